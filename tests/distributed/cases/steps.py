"""What a loop does between backward, the step and the next forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.clip_grad import clip_grad_norm_ as clip_of_an_early_import
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_osdp
from hf_osdp.distributed import wire
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.description import UnitDescription
from hf_osdp.planner.wire import WireFormat
from hf_osdp.sharding import gradient_checks
from hf_osdp.sharding.between_steps import AcrossLayouts
from hf_osdp.sharding.steps import micro_step
from tests.helpers.architectures import no_float32, tiny_architecture
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import Case, Loop

Batch = dict[str, torch.Tensor]


class AssignsData(torch.optim.Optimizer):
    """Plain descent as some write it, which leaves new tensors in the place of parameters and no gradients."""

    def __init__(self, parameters: Any, lr: float):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad
                parameter.grad = None


def with_more(name: str = "gpt2") -> nn.Module:
    """With two parameters that only some losses use, and one without dimensions, which FSDP2 does not shard; of
    `mixtral`, few experts are sharded along another dimension than 0 on four ranks.
    """
    if name == "mixtral":
        model = tiny_architecture("MixtralForCausalLM", num_local_experts=2)
    else:
        model = tiny_model(name, layers=2, scale=10.0)
    for each in ("first", "second"):
        model.register_parameter(each, nn.Parameter(torch.ones(3, dtype=torch.float64)))
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    return model


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return tiny_loss(model, batch) * model.scale + 0.1 * (model.first.sum() + model.second.sum())


def update(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def measures_before_the_step(loop: Loop, number: int) -> None:
    loop.backward(number)
    with torch.no_grad():
        tiny_loss(loop.model, tiny_batch(number))
    loop.clip()
    if number == 1:
        tiny_loss(loop.model, tiny_batch(number))  # without backward
    update(loop)


def writes_after_an_evaluation(loop: Loop, number: int) -> None:
    loop.step(number)
    with torch.no_grad():
        tiny_loss(loop.model, tiny_batch(number))
        for parameter in loop.model.parameters():
            parameter.mul_(0.9)


def loads_after_an_evaluation(loop: Loop, number: int) -> None:
    before = {name: value * 0.9 for name, value in loop.model.state_dict().items()}
    loop.step(number)
    with torch.no_grad():
        tiny_loss(loop.model, tiny_batch(number))
    loop.model.load_state_dict(before if number == 1 else loop.model.state_dict())


def leaves_freeing_to_the_optimizer(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.optimizer.step()


def scales_in_a_hook(loop: Loop, number: int) -> None:
    def scale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.1)

    if number == 0:
        loop.optimizer.register_step_pre_hook(scale)
    loop.step(number)


def gives_up_a_group_of_micro_steps(loop: Loop, number: int) -> None:
    """As where a loss is not finite: what the first micro-step left is zeroed, and is in no later step."""
    with micro_step(loop.model, is_last=False):
        loop.loss(number).backward()
    if number > 0:
        loop.optimizer.zero_grad(set_to_none=number == 1)
    scales_between_micro_steps(loop, number, by=None)


def gives_up_micro_steps_of_large_shards(loop: Loop, number: int) -> None:
    with patch.object(gradient_checks, "_DENSE_ELEMENTS", 0):
        gives_up_a_group_of_micro_steps(loop, number)


def scales_between_micro_steps(loop: Loop, number: int, by: float | None = 1.0) -> None:
    for last in (False, True):
        with micro_step(loop.model, is_last=last):
            found = loop.loss(number + 5 * last)
            found.backward()
        for parameter in loop.model.parameters() if by else ():
            if parameter.grad is not None:
                parameter.grad.mul_(by)
    loop.losses.append(found.detach())
    update(loop)


def clips_by_torch(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.norms.append(float(clip_of_an_early_import(loop.model.parameters(), 0.1, error_if_nonfinite=True)))
    update(loop)


def between_steps(loop: Loop) -> Any:
    return AcrossLayouts("Work on weights in on_step_end")


def is_followed(loop: Loop, number: int) -> None:
    """A reference of another layout follows, as in TRL's `sync_ref_model`."""
    if number == 0:
        reference = tiny_model("llama", layers=2, scale=7.0)
        loop.model.__dict__["reference"] = fully_shard(reference) if loop.plan else reference
    loop.step(number)
    followed, reference = dict(loop.model.named_parameters()), loop.model.__dict__["reference"]
    with between_steps(loop):
        for name, parameter in reference.named_parameters():
            parameter.data.mul_(0.5).add_(followed[name].data, alpha=0.5)
    for name, parameter in reference.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        loop.more[f"reference.{name}"] = value.detach().clone()


def is_averaged(loop: Loop, number: int, options: dict[str, Any]) -> None:
    """Whole copies average weights, within a callback and in whole parameters; then the average takes their place."""
    averages = loop.model.__dict__.setdefault("averages", [AveragedModel(with_more("llama"), **options) for _ in "12"])
    loop.step(number)
    with between_steps(loop):
        averages[0].update_parameters(loop.model)
    with hf_osdp.full_parameters(loop.model, write_back=False):
        averages[1].update_parameters(loop.model)
    for number_of, average in enumerate(averages):
        loop.more |= {f"average {number_of}.{name}": value for name, value in average.module.state_dict().items()}
    if number == 2:
        with between_steps(loop), torch.no_grad():
            for parameter, mean in zip(loop.model.parameters(), averages[0].module.parameters(), strict=True):
                parameter.copy_(mean)


def is_changed_whole(loop: Loop, number: int) -> None:
    """Weights are whole inside, and what rank 0 writes is in shards after; some are loaded, some are not kept."""
    loop.step(number)
    with torch.no_grad():
        tiny_loss(loop.model, tiny_batch(1))  # leaves weights gathered
    shards, is_first = dict(loop.model.named_parameters()), loop.place[0] == 0
    with hf_osdp.full_parameters(loop.model) as whole, torch.no_grad():
        loop.more |= {f"whole {number}.{name}": p.detach().clone() for name, p in whole.named_parameters()}
        if is_first:
            whole.lm_head.weight.data.mul_(0.5)
            whole.model.load_state_dict({name: 0.9 * value for name, value in whole.model.state_dict().items()})
    if loop.plan is not None:
        with hf_osdp.full_parameters(loop.model.lm_head, write_back=False) as head, torch.no_grad():
            head.weight.zero_()
    assert all(parameter is shards[name] for name, parameter in loop.model.named_parameters())


def loads_whole_weights(loop: Loop, number: int) -> None:
    whole = with_more(loop.model.config.model_type)
    loop.model.load_state_dict({name: 0.1 * (7 + number) * value for name, value in whole.state_dict().items()})
    loop.step(number)


def sums_over_layouts(loop: Loop, number: int) -> None:
    loop.step(number)
    other = with_more("llama")
    with between_steps(loop):
        pairs = list(zip(other.parameters(), loop.model.parameters(), strict=True))
        loop.more[f"norm {number}"] = sum(p.detach().norm() ** 2 for _, p in pairs)
        loop.more[f"distance {number}"] = sum(((p.detach() - q.detach()) ** 2).sum() for p, q in pairs)
    for name in (f"norm {number}", f"distance {number}"):
        value = loop.more[name]
        loop.more[name] = value.full_tensor() if isinstance(value, DTensor) else value


@cache
def as_said(way: str) -> Any:
    """All but the last unit step so."""

    def change(number: int, decision: UnitDecision, unit: UnitDescription) -> dict[str, Any]:
        return {way: bool(unit.fqn) and (way != "states_on_host" or bool(unit.trainable_numel))}

    return change


SGD, LLAMA = torch.optim.SGD, partial(with_more, "llama")


def case(
    step: Any, layout: str = "mixed", *, kind: Any = SGD, way: str = "", model: Any = with_more, **more: Any
) -> Case:
    return Case(
        model=model, loss=loss, layout=layout, step=step, change=as_said(way) if way else None, reduce=False,
        optimizer=lambda model: kind(model.parameters(), lr=0.1), **{"max_norm": None, **more},
    )  # fmt: skip


given_up, scaled = gives_up_a_group_of_micro_steps, scales_between_micro_steps
reduces = "reduce_every_micro_step"
CASES = {
    "measures before the step": case(measures_before_the_step, max_norm=0.1),
    "writes after an evaluation": case(writes_after_an_evaluation),
    "loads after an evaluation": case(loads_after_an_evaluation),
    "leaves freeing to the optimizer": case(leaves_freeing_to_the_optimizer, kind=AssignsData),
    "scales in a hook": case(scales_in_a_hook, way="states_on_host"),
    "gives up micro-steps": case(given_up),
    "gives up micro-steps, zero3, large shards": case(gives_up_micro_steps_of_large_shards, "zero3"),
    "gives up micro-steps, zero3, reduces": case(given_up, "zero3", way=reduces),
    "scales between micro-steps": case(scaled, way=reduces),
    "scales between micro-steps, zero3 on 4": case(scaled, "zero3", world=4),
}
WORK: dict[str, Any] = {
    "torch clips": clips_by_torch, "is followed": is_followed, "is averaged": partial(is_averaged, options={}),
    "is averaged by EMA": partial(is_averaged, options={"multi_avg_fn": get_ema_multi_avg_fn(0.5)}),
    "is changed whole": is_changed_whole, "loads whole weights": loads_whole_weights,
    "sums over layouts": sums_over_layouts,
}  # fmt: skip
CASES |= {
    f"{name}, {layout}": case(step, layout, model=LLAMA, steps=4, slow=layout != "mixed" or "EMA" in name)
    for name, step in WORK.items() for layout in ("mixed", "zero3", "zero2", "replicate")
}  # fmt: skip


def experts_are_cut_along_their_width(loop: Loop, units: object) -> None:
    found = {p.placements for name, p in loop.model.named_parameters() if "experts" in name}
    assert found == {(Shard(1),)}


CASES |= {
    f"{name}, few experts": case(
        WORK[name], "zero3", model=partial(with_more, "mixtral"), world=4, steps=2, within=no_float32,
        check=experts_are_cut_along_their_width,
    ) for name in ("torch clips", "is changed whole", "loads whole weights")
}  # fmt: skip


# ---- fewer bits on the wire, without rounding


def by_wire(
    number: int, decision: UnitDecision, unit: UnitDescription, wire: WireFormat = WireFormat.INT8
) -> dict[str, Any]:
    """Two nodes of two; whole shards over all of them are gathered in two stages."""
    if decision.shard_size == 4:
        gather = wire if wire.for_parameters else WireFormat.INT8
        return {"stage_size": 2, "gather_wire": gather, "reduce_wire": wire}
    return {"replica_wire": wire} if decision.shard_size == 2 else {}


@contextmanager
def without_rounding() -> Iterator[None]:
    """Have float64 in the place of codes."""

    def encode(values: torch.Tensor, codes: torch.Tensor, wire: WireFormat) -> None:
        codes[: 8 * values.numel()].view(torch.float64).copy_(values)

    def decode(codes: torch.Tensor, values: torch.Tensor, wire: WireFormat, *, add: bool = False) -> None:
        found = codes[: 8 * values.numel()].view(torch.float64)
        values.add_(found) if add else values.copy_(found)

    with (
        patch.multiple(wire, encode=encode, decode=decode),
        patch.object(WireFormat, "nbytes", lambda wire, elements: 8 * elements),
    ):
        yield
        assert dist.is_initialized()


CASES |= {
    f"wire, {layout}": Case(
        layout=layout, world=4, accumulation_steps=2, reduce=None, change=by_wire, within_ranks=without_rounding,
        slow=layout != "mixed",
    )
    for layout in ("two_stage", "mixed")
}  # fmt: skip
