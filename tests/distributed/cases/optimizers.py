"""Optimizers: element-wise, of whole parameters, Muon, of other packages, with states on the host; frozen and
quantized models.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.optimization import Adafactor

from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import UnitDescription
from hf_osdp.planner.plan import UnitDecision
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import spec_of_optimizer
from hf_osdp.sharding.optimizers.kind import ELEMENT_WISE
from hf_osdp.tracing.describe import describe
from tests.helpers.models import SEQUENCE_LENGTH, tiny_model
from tests.helpers.quantized import adapted, in_4_bits
from tests.helpers.training import Case, Loop

from .layouts import decayed, halved, of

Units = tuple[UnitDescription, ...]


class SignOfMomentum(torch.optim.Optimizer):
    """Element-wise, and not torch's own."""

    def __init__(self, parameters: Any, lr: float = 0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                parameter.add_(momentum.sign(), alpha=-group["lr"])


class TrustRatio(SignOfMomentum):
    """Scales by norms, under a name that says nothing of it."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad * (parameter.norm() / parameter.grad.norm()), alpha=-group["lr"])


class GlobalNorm(SignOfMomentum):
    """Scales by the norm of all gradients of a group, as no single parameter's shard could tell."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            for parameter in held:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(momentum.lerp_(parameter.grad / norm, 0.5), alpha=-group["lr"])


# ---- element-wise


class Perceptron(nn.Sequential):
    """Two layers."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__(nn.Linear(width, rows), nn.Tanh(), nn.Linear(rows, 3))


def perceptron(width: int = 5, rows: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return Perceptron(width, rows).double()


def features(model: Any) -> Any:
    width = model[0].in_features

    def batch(step: int, *, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
        rows = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        return {"rows": rows.chunk(parts)[part]}

    return batch


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["rows"]).square().sum(-1).mean()


def of_class(cls: type[torch.optim.Optimizer], **options: Any) -> Any:
    return lambda model: cls([p for p in model.parameters() if p.requires_grad], **options)


def one_whole(number: int, decision: UnitDecision, unit: UnitDescription) -> dict[str, Any]:
    return {"shard_size": 1 + number % 2, "stage_size": 1}


PERCEPTRON: dict[str, Any] = {
    "units": partial(find_units, block_classes=["Linear"]), "batches": features, "loss": squares, "max_norm": None,
}  # fmt: skip
assert len(ELEMENT_WISE) == 10
CASES = {
    cls.__name__: Case(**PERCEPTRON, model=perceptron, change=one_whole, optimizer=of_class(cls, lr=0.1))
    for cls in (*ELEMENT_WISE, torch.optim.Rprop, SignOfMomentum)
}


# ---- states on the host, frozen parameters


def states_on_host(number: int, decision: UnitDecision, unit: UnitDescription) -> dict[str, Any]:
    """All but one unit have their states there."""
    return {"on_host": False, "states_on_host": number != 1 and bool(unit.trainable_numel)}


def states_are_buffers(loop: Loop, units: Units) -> None:
    """The states are the buffers that go to the host."""
    assert loop.plan is not None
    named, optimizer = dict(loop.model.named_parameters()), loop.optimizer
    away = [unit for unit in units if loop.plan.decision(unit.fqn).states_on_host]
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_post_hooks.values())
    stages = [stage for owner in owners if owner is not None for stage in owner.stages]
    buffers = {id(value) for stage in stages for value in stage._host.values()}
    held = {id(local(state)): id(p) for p, states in optimizer.state.items() for state in states.values()}
    assert {held[buffer] for buffer in buffers} == {id(named[p.name]) for unit in away for p in unit.trainable}


@cache
def frozen(parts: tuple[str, ...], seed: int = 0) -> Any:
    """Return what makes a model in which parameters of these names are frozen."""

    def make() -> nn.Module:
        model = tiny_model("gpt2", seed=seed)
        for each, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in each for part in parts))
        return model

    return make


def waiting(layout: str, kind: str, **options: Any) -> Case:
    small = {"model": of("gpt2", layers=2, width=32), "layout": layout, "change": states_on_host, "schedule": halved}
    check = states_are_buffers if kind == "AdamW" else None
    return Case(**{**small, "optimizer": partial(decayed, kind=kind), "check": check, **options})


CASES |= {
    f"states on host, {layout}, {kind}": waiting(
        layout, kind, slow=(layout, kind) not in (("mixed", "AdamW"), ("zero3", "SGD"))
    ) for layout in ("zero3", "mixed", "replicate") for kind in ("AdamW", "SGD", "NAdam")
}  # fmt: skip
CASES |= {
    "states on host, bitsandbytes": waiting(
        "mixed", "AdEMAMix", optimizer=partial(decayed, kind="AdEMAMix", package="bitsandbytes.optim"),
        tolerance=1e-9, needs="bitsandbytes",
    ),
    "states on host, no group, frozen": waiting("replicate", "AdamW", world=0, model=frozen(("mlp",))),
    "frozen blocks": Case(
        world=4, model=frozen(("wte", "wpe", "h.0", "h.3", "attn", "mlp.c_proj", "h.1.ln", "h.1.mlp.c_fc.weight")),
        max_norm=0.01,
    ),
}  # fmt: skip


# ---- whole parameters, and Muon on shards

EPS = (1e-6, 1e-3)
"""Above the rounding of gradients that are 0, as those of keys' biases: Adafactor would scale it up to updates."""


def frozen_shards(number: int, decision: UnitDecision, unit: UnitDescription) -> dict[str, Any]:
    """Frozen units are sharded, others replicated; kept or freed."""
    return {"shard_size": 1 if unit.trainable_numel else 2, "reshard_after_forward": bool(number % 2)}


def states_are_planned(loop: Loop, units: Units) -> None:
    """States are plain tensors of the planned bytes, and replicas equal."""
    spec = spec_of_optimizer(loop.optimizer, device_type="cpu")
    stepped = {name: p for name, p in loop.model.named_parameters() if p in loop.optimizer.state}
    states = [v for p in stepped.values() for v in loop.optimizer.state[p].values() if torch.is_tensor(v) and v.dim()]
    assert not any(isinstance(value, DTensor) for value in states)
    planned = sum(spec.state_bytes(p, 1) for unit in units for p in unit.trainable if p.name in stepped)
    assert planned == sum(value.nbytes for value in states)
    for value in (*states, *(local(p).detach() for p in loop.model.parameters() if p.requires_grad)):
        others = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(others, value.contiguous())
        assert torch.equal(*others)


WHOLE: dict[str, Any] = {
    "adafactor": lambda model: Adafactor(model.parameters(), weight_decay=0.1, eps=EPS),
    "adafactor with a first moment": lambda model: Adafactor(
        model.parameters(), lr=1e-2, beta1=0.9, relative_step=False, scale_parameter=False, weight_decay=0.1, eps=EPS
    ),
    "torch's adafactor": of_class(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1, eps=EPS),
    "muon of replicas": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
    "trust ratio": of_class(TrustRatio, lr=1e-2),
    "global norm": of_class(GlobalNorm),
}
CASES |= {
    name: Case(
        model=frozen(("transformer.h.1.", "transformer.h.2.")), layout="replicate", change=frozen_shards,
        optimizer=make, max_norm=None, check=states_are_planned,
        slow=name not in ("adafactor with a first moment", "global norm"),
        tolerance=1e-2 if "muon" in name else 1e-12,  # Muon multiplies in bf16, whatever it is given
    )
    for name, make in WHOLE.items()
}  # fmt: skip

in_float64 = partial(patch.object, torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.float64, copy=True))
"""Muon's products, which are in bf16."""


def matrices_alone() -> nn.Module:
    """Matrices alone are trained, as one optimizer has them all. Of the embeddings it is the one of positions, whose
    rows are fewer than ranks in some cases.
    """
    model = tiny_model("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 2 and any(part in name for part in ("mlp", "attn", "wpe")))
    return model


def muon(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def states_are_plain(loop: Loop, units: Units) -> None:
    assert not any(isinstance(value, DTensor) for states in loop.optimizer.state.values() for value in states.values())


def by_muon(layout: str, *, away: bool = False, slow: bool = False, world: int = 2, **options: Any) -> Case:
    """With `away`, every second trained unit has its states on the host."""
    change = (lambda i, decision, unit: {"states_on_host": bool(i % 2 and unit.trainable_numel)}) if away else None
    return Case(
        model=matrices_alone, layout=layout, world=world, change=change, optimizer=partial(muon, **options), steps=2,
        max_norm=None, within=in_float64, check=states_are_plain, slow=slow,
    )  # fmt: skip


def signs(loop: Loop, number: int) -> None:
    """A hook that came after the plan replaces the gradients."""

    def replace_gradients(*_: object) -> None:
        for parameter in loop.optimizer.param_groups[0]["params"]:
            parameter.grad = parameter.grad.sign()

    hook = loop.optimizer.register_step_pre_hook(replace_gradients)
    loop.step(number)
    hook.remove()


CASES |= {
    "muon, zero2, options": by_muon("zero2", nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "muon, mixed": by_muon("mixed", ns_steps=3, slow=True),
    "muon, states on host": by_muon("zero3", away=True),
    **{f"muon, {layout} on 4": by_muon(layout, away=layout == "mixed", world=4, slow=True)
       for layout in ("hsdp", "two_stage", "mixed")},
    "muon, mixed, hooks": replace(by_muon("mixed"), step=signs),
}  # fmt: skip


# ---- quantized states: where blocks lie inside shards a sharded run is that of one process

BLOCKS = {"torchao": 128, "bitsandbytes": 256}
"""Width at which every shard of whole rows has whole blocks."""


def low_bit(package: str, kind: str, lr: float = 1e-2) -> Any:
    """Return what makes an optimizer of the package, or of torch if that has it alone."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        found = import_module(f"{package}.optim")
        if package == "bitsandbytes":  # it keeps options of parameters for the whole process
            found.GlobalOptimManager.get_instance().initialize()
        return getattr(found if hasattr(found, kind) else torch.optim, kind)(model.parameters(), lr=lr)

    return make


def eagerly() -> Any:
    """Torchao compiles its steps for each shape, which takes longest."""
    return torch.compiler.set_stance("force_eager")


def quantized(package: str, kind: str, *, width: int | None = None, tolerance: float = 1e-9, **options: Any) -> Case:
    return Case(**{
        "model": of("gpt2", layers=2, width=width or BLOCKS[package]), "optimizer": low_bit(package, kind),
        "steps": 2, "max_norm": None, "within": eagerly, "with_states": False, "tolerance": tolerance,
        "needs": package, **options,
    })  # fmt: skip


def without_zeros(loop: Loop, number: int) -> None:
    """Keys have no gradient from their biases but rounding, of which Lion takes the sign."""
    loop.backward(number)
    for name, parameter in loop.model.named_parameters():
        if "c_attn.bias" in name:
            parameter.grad.zero_()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def steps_are_counted(loop: Loop, units: Units) -> None:
    """Also of a parameter of which this rank has no row."""
    assert {int(states["step"]) for states in loop.optimizer.state.values()} == {3}


ONE_ROW = {**PERCEPTRON, "model": partial(perceptron, 8192, 1), "check": steps_are_counted}
CASES |= {
    "Lion8bit": quantized("bitsandbytes", "Lion8bit", step=without_zeros),
    "8 bits, one row": quantized("bitsandbytes", "AdamW8bit", **ONE_ROW, layout="zero3", steps=3),
}


# ---- adapters

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn", "c_fc"]}


def with_adapters(name: str) -> nn.Module:
    return adapted(tiny_model(name), torch.float64, target_modules=TARGETS[name])


def on_4_bits(storage: torch.dtype, **options: Any) -> nn.Module:
    base = tiny_model("llama", dtype=torch.float32, scale=5.0, layers=2)
    return adapted(in_4_bits(base, quant_storage=storage, **options), torch.float32)


def described(model: nn.Module) -> Units:
    return describe(model, sequence_length=SEQUENCE_LENGTH, recomputation=False).units


def adapters_alone(loop: Loop, units: Units) -> None:
    """Only adapters are trained, all of them."""
    named = list(loop.model.named_parameters())
    assert all(p.requires_grad == ("lora_" in name) == (p in loop.optimizer.state) for name, p in named)


def adapter(model: Any, layout: str, **options: Any) -> Case:
    trainable = lambda model: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)  # noqa: E731
    return Case(
        model=model, layout=layout, optimizer=trainable, check=adapters_alone, max_norm=0.05, needs="peft", **options
    )


def over_4_bits(layout: str, storage: torch.dtype, slow: bool = True, **options: Any) -> Case:
    """In float32, as bitsandbytes has no float64."""
    model = partial(on_4_bits, storage, **options)
    return replace(
        adapter(model, layout, units=described, only="lora_", tolerance=1e-4, slow=slow), needs="bitsandbytes"
    )


CASES |= {
    "adapters, llama": adapter(partial(with_adapters, "llama"), "everything"),
    "adapters, gpt2": adapter(partial(with_adapters, "gpt2"), "everything", slow=True),
    "adapters, compiled": adapter(partial(with_adapters, "gpt2"), "compiled", slow=True),
    "4 bits": over_4_bits("everything", torch.float32, slow=False),
    "4 bits, fp4": over_4_bits("zero3", torch.uint8, compress_statistics=False, quant_type="fp4"),
    "4 bits, replicas": over_4_bits("replicate", torch.bfloat16),
}
