"""Whatever the layout, training is that of one process: loss, gradient norm and every parameter, in float64."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist

from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import LAYOUTS
from tests.helpers.models import MODELS
from tests.helpers.training import MAX_NORM, Trained, train_alone, train_by_layout

TOLERANCE = 1e-12
CASES = {
    **{f"{model}-{layout}": {"model_name": model, "layout": layout} for model in MODELS for layout in LAYOUTS},
    **{
        f"gpt2-{layout}-accumulate-{name}": {
            "model_name": "gpt2", "layout": layout, "accumulation_steps": 2, "reduce_every_micro_step": reduce,
        }
        for layout in ("zero3", "everything") for name, reduce in (("reduce", True), ("hold", False),
                                                                   ("by_unit", None))
    },
    **{f"gpt2-{layout}-async": {"model_name": "gpt2", "layout": layout,
                                "async_gathers": True} for layout in ("two_stage", "mixed")},
    **{f"{model}-mixed-checkpointing": {"model_name": model, "layout": "mixed",
                                        "checkpointing": True} for model in ("gpt2", "llama")},
}  # fmt: skip

EVERYDAY = {
    *(f"gpt2-{layout}" for layout in LAYOUTS if layout not in ("compiled", "mixed")),
    *(f"{model}-everything" for model in MODELS),
    "gpt2-zero3-accumulate-hold", "gpt2-everything-accumulate-by_unit", "gpt2-mixed-async", "gpt2-mixed-checkpointing",
}  # fmt: skip
"""Every layout, model and option once; the other cases combine them anew and are slow. By unit, some reduce and some
hold. Compiled blocks take a minute to generate code; `test_blocks.py` trains with them before it is generated."""

# Two ranks know fewer layouts (half of them is one rank, which replicates), and show little that four do not.
NAMES = {
    4: tuple(CASES),
    2: tuple(name for name in CASES if "everything" in name or "compiled" in name or name.startswith("bert")),
}
IS_SLOW = {(world_size, name): name not in EVERYDAY for world_size, names in NAMES.items() for name in names}
IS_SLOW[2, "gpt2-compiled"] = False  # four ranks take longer to generate code


def run_cases(names: tuple[str, ...]) -> dict[str, Trained]:
    from hf_osdp.distributed.mesh import Meshes

    meshes = Meshes("cpu")
    results = {name: train_by_layout(meshes=meshes, **CASES[name]) for name in names}
    return results if dist.get_rank() == 0 else {}


@functools.cache
def reference(model_name: str, accumulation_steps: int) -> Trained:
    return train_alone(model_name, accumulation_steps=accumulation_steps)


@functools.cache
def results(world_size: int, slow: bool) -> dict[str, Trained]:
    names = tuple(name for name in NAMES[world_size] if IS_SLOW[world_size, name] == slow)
    return run_ranks(run_cases, world_size, names, timeout_s=240, shared=True, nodes=world_size // 2)[0]


@pytest.mark.parametrize(
    "world_size, name",
    [pytest.param(*case, marks=[pytest.mark.slow] if slow else []) for case, slow in IS_SLOW.items()],
)
def test_training_equals_one_process(world_size, name):
    case = CASES[name]
    alone = reference(case["model_name"], case.get("accumulation_steps", 1))
    assert min(alone.norms) > MAX_NORM, "clipping must act"
    errors = results(world_size, IS_SLOW[world_size, name])[name].worst_error(alone)
    assert max(errors.values()) < TOLERANCE, errors
