"""Optimizers that look at whole parameters: what they train is replicated, and trains as in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.optimization import Adafactor

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, PlanError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.optimizers import spec_of_trainer_name
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.split import OperatorSplit
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import check_optimizer, spec_of_optimizer
from hf_osdp.sharding.optimizer_steps import prepare_new_optimizers, step_on_shards
from hf_osdp.sharding.optimizers import kind_of
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.checkpointed import trained_by_plan, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model
from tests.helpers.training import trained

from .test_integration_trainer import LENGTH, PlannedTrainer, StockTrainer, arguments, assert_close, history, tokens
from .test_optimizers import TrustRatio

EPS = (1e-6, 1e-3)
"""Above the rounding of gradients that are 0, as those of keys' biases: Adafactor would scale it up to updates."""
FROZEN = ("transformer.h.1.", "transformer.h.2.")


class GlobalNorm(torch.optim.Optimizer):
    """Scales by the norm of all gradients of a group, as no single parameter's shard could tell."""

    def __init__(self, parameters, lr: float = 0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            for parameter in held:
                self.state[parameter].setdefault("momentum", torch.zeros_like(parameter)).lerp_(
                    parameter.grad / norm, 0.5
                )
                parameter.add_(self.state[parameter]["momentum"], alpha=-group["lr"])


KINDS = {
    "adafactor": lambda parameters: Adafactor(parameters, weight_decay=0.1, eps=EPS),
    "adafactor with a first moment": lambda parameters: Adafactor(
        parameters, lr=1e-2, beta1=0.9, relative_step=False, scale_parameter=False, weight_decay=0.1, eps=EPS
    ),
    "torch's adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=0.1, eps=EPS),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2),
    "trust ratio": lambda parameters: TrustRatio([p for p in parameters if p.requires_grad], lr=1e-2),
    "global norm": GlobalNorm,
}


def partly_frozen(seed: int = 0) -> nn.Module:
    model = tiny_model("gpt2", seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def plan_for(model: nn.Module) -> Plan:
    """Frozen units sharded, others replicated, kept or freed."""
    units, world = find_units(model), dist.get_world_size()
    plan = plan_of(units, world, "replicate")
    sharded = {unit.fqn for unit in units if not unit.trainable_numel}
    decisions = []
    for number, decision in enumerate(plan.units):
        frozen = decision.fqn in sharded
        layout = {"shard_size": world if frozen else 1, "reshard_after_forward": bool(number % 2)}
        decisions.append(replace(decision, **layout))
    return replace(plan, units=tuple(decisions))


def on_ranks(kind: str, folder: str = "", start: int = 0, steps: int = 3) -> tuple[dict, dict, list, list]:
    """Train by the plan; return weights, planned and held bytes of states, this rank's replicas and states."""
    model = partly_frozen(seed=start)
    units, plan = find_units(model), plan_for(model)
    optimizer = trained_by_plan(
        model, plan, lambda: KINDS[kind](model.parameters()), range(start, start + steps), folder
    )
    spec = spec_of_optimizer(optimizer, device_type="cpu")
    stepped = {name: p for name, p in model.named_parameters() if p in optimizer.state}
    planned = [sum(spec.state_bytes(p, 1) for unit in units for p in unit.trainable if p.name in stepped)]
    states = [v for p in stepped.values() for v in optimizer.state[p].values() if torch.is_tensor(v) and v.dim()]
    assert not any(isinstance(value, DTensor) for value in states)
    replicas = [local(p).detach() for p in model.parameters() if p.requires_grad]
    return full_state_dict(model), {"planned": planned, "held": [sum(v.nbytes for v in states)]}, replicas, states


def alone(kind: str, steps: int) -> dict[str, torch.Tensor]:
    model = partly_frozen()
    trained(model, KINDS[kind](model.parameters()), None, range(steps))
    return full_state_dict(model)


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_one_process_and_states_take_planned_bytes(kind):
    (weights, nbytes, *first), (_, _, *second) = run_ranks(on_ranks, 2, kind, timeout_s=200, shared=True)
    assert worst(weights, alone(kind, 3)) < (1e-2 if kind == "muon" else 1e-12), (
        "Muon multiplies in bf16, whatever it is given"
    )
    assert nbytes["planned"] == nbytes["held"]
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["adafactor", "torch's adafactor", "global norm"])
def test_checkpoints_go_on_in_one_process_and_back(tmp_path, kind):
    run_ranks(on_ranks, 2, kind, str(tmp_path), 0, 2, timeout_s=200, shared=True)
    run_ranks(on_ranks, 1, kind, str(tmp_path), 2, 2, timeout_s=200, shared=True)
    (weights, *_), _ = run_ranks(on_ranks, 2, kind, str(tmp_path), 4, 2, timeout_s=200, shared=True)
    assert worst(weights, alone(kind, 6)) < 1e-12


@pytest.mark.on_ranks(2, shared=True)
def test_parameters_that_are_sharded_or_in_slices_are_refused():
    model = partly_frozen()
    plan = plan_of(find_units(model), 2, "zero3")
    apply_plan(model, plan, find_units(model), meshes=Meshes("cpu"))
    said = r"^Adafactor is not element-wise: it needs whole parameters, and \d+ of \d+ are sharded, in parts or on the host; plan for"  # noqa: E501
    with pytest.raises(OSDPError, match=said):
        check_optimizer(Adafactor(model.parameters()))
    check_optimizer(Adafactor([p for p in model.parameters() if not p.requires_grad]))
    cut = tiny_model("gpt2")
    split_operators(cut, [OperatorSplit(fqn="transformer.h.0.mlp.c_fc", slices=2)])
    with pytest.raises(OSDPError, match="in parts"):
        step_on_shards(Adafactor(cut.parameters()), cut)
    prepare_new_optimizers(model, lambda module, optimizer: None)
    optimizer = Adafactor(model.parameters())
    with pytest.raises(OSDPError, match="it needs whole parameters"):
        trained(model, optimizer, plan, range(1))


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, list[float]]:
    trainer = StockTrainer(
        model=partly_frozen(), args=of_trainer(tmp_path_factory.mktemp("one"), 8), train_dataset=tokens()
    )
    trainer.train()
    return history(trainer)


def of_trainer(folder, samples: int, **options) -> TrainingArguments:
    return arguments(str(folder), per_device_train_batch_size=samples, optim="adafactor", **options)


def small_devices(**options) -> OSDPConfig:
    hardware = preset("cpu", devices_per_node=2)
    return OSDPConfig(hardware=hardware, sequence_length=LENGTH, operator_splitting=False, compare=False, **options)


@pytest.mark.on_ranks(2, init=False)
def test_trainer_plans_for_adafactor_resumes_and_equals_the_stock_one(tmp_path, stock):
    args = of_trainer(tmp_path, 4, save_strategy="steps", save_steps=2)
    model = partly_frozen()  # seeds the order of samples, where it comes after the Trainer
    trained_units = {unit.fqn for unit in find_units(model) if unit.trainable_numel}
    trainer = PlannedTrainer(model=model, args=args, train_dataset=tokens(), osdp=small_devices())
    assert all(unit.shard_size == 1 for unit in trainer.plan.units if unit.fqn in trained_units)
    trainer.train()
    assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), Adafactor)
    assert_close(history(trainer), stock, 1e-6)
    again = PlannedTrainer(
        model=partly_frozen(seed=1), args=args, train_dataset=tokens(), osdp=small_devices(memory_limit="1GiB")
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_close(history(again), {"loss": stock["loss"][2:]}, 1e-6)
    given = plan_of(find_units(partly_frozen()), 2, "zero3")
    given = replace(given, sequence_length=LENGTH, micro_batch_size=4)
    with pytest.raises(PlanError, match=r"^adafactor needs whole parameters, and the plan has"):
        PlannedTrainer(model=partly_frozen(), args=args, train_dataset=tokens(), osdp=OSDPConfig(plan=given))


@pytest.mark.on_ranks(2, init=False)
def test_accelerate_and_plain_loop_plan_for_adafactor():
    accelerator = OSDPAccelerator(cpu=True, osdp=small_devices(global_batch_size=8))
    model = tiny_model("gpt2")
    matrices, others = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]
    adafactor, adamw = torch.optim.Adafactor(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)
    model, adafactor, adamw = accelerator.prepare(model, adafactor, adamw)
    assert {unit.shard_size for unit in accelerator.planned_run.plan.units} == {1}
    trained(model, adafactor, accelerator.planned_run.plan, range(1))
    adamw.step()
    plain = OptimalShardedDataParallel(tiny_model("gpt2"), small_devices(global_batch_size=8), optimizer="adafactor")
    assert {unit.shard_size for unit in plain.plan.units} == {1}
    trained(plain.module, Adafactor(plain.parameters()), plain.plan, range(2))
    with pytest.raises(ValueError, match="optimizer is of type AdamW; give an OptimizerSpec"):
        OptimalShardedDataParallel(
            tiny_model("gpt2"), small_devices(global_batch_size=8), optimizer=torch.optim.AdamW(matrices)
        )


def test_what_is_counted_is_what_the_name_says():
    made = Adafactor([nn.Parameter(torch.zeros(2, 2))], scale_parameter=False, relative_step=False, lr=1e-3)
    counted, named = spec_of_optimizer(made, device_type="cuda"), spec_of_trainer_name("adafactor", device_type="cuda")
    assert replace(counted, loop_scratch=2.0) == named and abs(counted.loop_scratch - 2) < 0.05


@pytest.mark.on_ranks(2, shared=True)
def test_rounding_at_random_is_refused_where_there_are_replicas_alone():
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed; pip install 'hf_osdp[low-bit]'")
    for layout, dtype, refused in (
        ("replicate", torch.bfloat16, True),
        ("zero3", torch.bfloat16, False),
        ("replicate", torch.float32, False),
    ):
        model = tiny_model("gpt2", dtype=dtype)
        apply_plan(model, plan_of(find_units(model), 2, layout), find_units(model), meshes=Meshes("cpu"))
        optimizer = torchao.AdamW8bit(model.parameters(), bf16_stochastic_round=True)
        if refused:
            with pytest.raises(OSDPError, match=r"^AdamW8bit rounds parameters in bf16 at random"):
                step_on_shards(optimizer, model)
        else:
            step_on_shards(optimizer, model)


class RoundsAtRandom(GlobalNorm):
    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            noise = torch.rand_like(parameter) / 100 if parameter.dtype is torch.bfloat16 else 0
            parameter.add_(parameter.grad + noise, alpha=-0.1)


def test_randomness_is_looked_for_in_the_parameters_own_dtype():
    assert not kind_of(RoundsAtRandom([nn.Parameter(torch.ones(2, 2))])).needs_whole()
    with pytest.raises(OSDPError, match="updates at random"):
        kind_of(RoundsAtRandom([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))])).needs_whole()
