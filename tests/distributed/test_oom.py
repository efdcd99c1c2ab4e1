"""Memory runs out on one of two ranks: where under FSDP2, all ranks told, and a run that goes on by another plan."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from benchmarks.gpu_suite import catalogue  # noqa: F401  (the catalogue has the order of steps)
from benchmarks.gpu_suite.faults import problem_of, runs_out
from hf_osdp.modeling.units import find_units
from hf_osdp.preparation.out_of_memory import place_of
from hf_osdp.sharding.apply import apply_plan
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.output import ends_of


def fail(*args: object, **kwargs: object) -> None:
    """As the allocator of CUDA says it."""
    raise torch.OutOfMemoryError("Tried to allocate 512.00 KiB.")


class Fails(torch.autograd.Function):
    """An operator whose backward finds no memory."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail()


PLACES = {
    "forward": "forward of transformer.h.1",
    "backward": "backward of transformer.h.1",
    "recompute": "recomputation of transformer.h.1",
    "gather": "gathering of transformer.h.1",
    "gather again": "gathering of transformer.h.1",
    "reduce": "reducing the gradients of transformer.h.1",
    "step": "the optimizer's step",
}  # fmt: skip


def place(moment: str) -> str:
    model = tiny_model("gpt2", layers=2)
    units = find_units(model)
    if moment == "recompute":
        model.gradient_checkpointing_enable()
    apply_plan(model, plan_of(units, 2, "zero3"), units)
    optimizer = torch.optim.AdamW(model.parameters())
    inner, group, kept, passes = model.transformer.h[1].mlp, _fsdp_param_group, dict(vars(_fsdp_param_group)), []
    match moment:
        case "forward":
            inner.register_forward_pre_hook(fail)
        case "backward":
            inner.register_forward_hook(lambda module, args, output: Fails.apply(output))
        case "recompute":
            inner.register_forward_pre_hook(lambda *args: passes.append(1) or (fail() if len(passes) == 2 else None))
        case "gather":
            model.transformer.h[1].register_forward_pre_hook(
                lambda *args: setattr(group, "foreach_all_gather", fail), prepend=True
            )
        case "gather again":
            model.register_forward_hook(lambda *args: setattr(group, "foreach_all_gather", fail))
        case "reduce":
            group.foreach_reduce = fail
        case "step":
            optimizer._init_group = fail
    try:
        tiny_loss(model, tiny_batch(0, part=0, parts=2)).backward()
        optimizer.step()
    except torch.OutOfMemoryError as error:
        return place_of(error, model, units)
    finally:
        for name in ("foreach_all_gather", "foreach_reduce"):
            setattr(group, name, kept[name])
    return "nowhere"


@pytest.mark.on_ranks(2, shared=True)
def test_place_of_error_under_fsdp_is_found_everywhere():
    assert {moment: place(moment) for moment in PLACES} == PLACES


@pytest.mark.slow
@pytest.mark.parametrize("on_oom", ["raise", "replan"])
def test_all_ranks_end_with_the_error_or_go_on_by_a_safer_plan(on_oom):
    done = runs_out(2, on_oom, "cpu", timeout_s=280)
    assert not problem_of(done, 2, on_oom), ends_of(done.stderr)
