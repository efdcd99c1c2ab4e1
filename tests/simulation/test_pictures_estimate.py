"""The estimate for batches with pictures beside FSDP2's real step on fake tensors."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.catalogue import find_shape
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.description import DType
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.preparation.simulate import simulate
from hf_osdp.tracing.describe import describe
from tests.helpers.layouts import plan_of
from tests.helpers.problems import problem

HARDWARE = preset("h100", devices_per_node=4)
JOB = TrainingJob(
    global_batch_size=2 * HARDWARE.world_size, micro_batch_size=2, precision=Precision.named("bf16")
)  # fmt: skip
CUDA = {"device_type": "cuda", "capability": (9, 0)}


def two_layers(name: str):
    """A model of the catalogue with two layers of each part, in full width."""
    config = find_shape(name).config
    for part in (config.text_config, config.vision_config):
        for layers in ("num_hidden_layers", "depth"):
            if hasattr(part, layers):
                setattr(part, layers, 2)
    config.text_config.layer_types = ["full_attention"] * 2
    for name, layers in (("fullatt_block_indexes", [1]), ("deepstack_visual_indexes", [0])):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, layers)
    return build_on_meta(config)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["least", "half way"])
@pytest.mark.parametrize("name", ["llava-1.5-7b-hf", "Qwen2.5-VL-7B-Instruct"])
def test_simulated_peak_with_a_picture_is_within_one_percent(name, limit):
    model = two_layers(name)
    description = describe(model, sequence_length=768, compute_dtype=DType.BFLOAT16, **CUDA)
    assert "1 picture of" in description.trace
    least, most = (least_memory(problem(description, HARDWARE, JOB, strategy=one)) for one in ("osdp", "ddp"))
    found = search(problem(description, HARDWARE, JOB, least if limit == "least" else (least + most) // 2))
    simulated = simulate(model, found.plan, description=description, job=JOB, **CUDA).peak_bytes
    assert found.memory.peak_bytes == pytest.approx(simulated, rel=0.01)


RECOMPUTED = {"activations": Activations.RECOMPUTE}


@functools.cache
def llava():
    model = two_layers("llava-1.5-7b-hf")
    return model, describe(
        model, sequence_length=768, compute_dtype=DType.BFLOAT16, partial_recomputation=False, **CUDA
    )


@pytest.mark.parametrize(
    ("part", "changes"),
    [("vision", RECOMPUTED), ("language", RECOMPUTED), ("language", {"on_host": True, "shard_size": 1})],
    ids=["vision recomputed", "language recomputed", "replicas on the host"],
)
def test_estimate_of_llava_whose_last_vision_layer_has_no_backward(part, changes):
    """The layer runs, but features are those of the layer before: what it saves is freed in forward."""
    model, description = llava()
    units = plan_of(description.units, HARDWARE.world_size, "zero3").units
    units = tuple(replace(unit, **changes) if ".layers." in unit.fqn and part in unit.fqn else unit for unit in units)
    plan = replace(plan_of(description.units, HARDWARE.world_size, "zero3"), units=units, micro_batch_size=2)
    estimate = estimate_memory(description, plan.layouts(description), HARDWARE.world_size, JOB, plan.batch)
    assert estimate.peak_bytes == pytest.approx(
        simulate(model, plan, description=description, job=JOB, **CUDA).peak_bytes, rel=0.01
    )
