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
from tests.helpers.sampling import slow_but

HARDWARE = preset("h100", devices_per_node=4)
WORLD = HARDWARE.world_size
JOB = TrainingJob(global_batch_size=2 * WORLD, micro_batch_size=2, precision=Precision.named("bf16"))
CUDA = {"device_type": "cuda", "capability": (9, 0)}


def described(name: str, **options):
    """A model of the catalogue with two layers of each part, in full width; and its description."""
    config = find_shape(name).config
    for part in (config.text_config, config.vision_config):
        for layers in ("num_hidden_layers", "depth"):
            if hasattr(part, layers):
                setattr(part, layers, 2)
    config.text_config.layer_types = ["full_attention"] * 2
    for name, layers in (("fullatt_block_indexes", [1]), ("deepstack_visual_indexes", [0])):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, layers)
    model = build_on_meta(config)
    return model, describe(model, sequence_length=768, compute_dtype=DType.BFLOAT16, **options, **CUDA)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["least", "half way"])
@pytest.mark.parametrize("name", ["llava-1.5-7b-hf", "Qwen2.5-VL-7B-Instruct"])
def test_simulated_peak_with_a_picture_is_within_one_percent(name, limit):
    model, description = described(name)
    assert "1 picture of" in description.trace
    least, most = (least_memory(problem(description, HARDWARE, JOB, strategy=one)) for one in ("osdp", "ddp"))
    found = search(problem(description, HARDWARE, JOB, least if limit == "least" else (least + most) // 2))
    simulated = simulate(model, found.plan, description=description, job=JOB, **CUDA).peak_bytes
    assert found.memory.peak_bytes == pytest.approx(simulated, rel=0.01)


llava = functools.cache(functools.partial(described, "llava-1.5-7b-hf", partial_recomputation=False))
RECOMPUTED = {"activations": Activations.RECOMPUTE}
CHANGES = {
    "vision recomputed": ("vision", RECOMPUTED), "language recomputed": ("language", RECOMPUTED),
    "replicas on the host": ("language", {"on_host": True, "shard_size": 1}),
}  # fmt: skip


@pytest.mark.parametrize("change", slow_but(CHANGES, daily=()))
def test_estimate_of_llava_whose_last_vision_layer_has_no_backward(change):
    """The layer runs, but features are those of the layer before: what it saves is freed in forward."""
    (model, description), (part, changes) = llava(), CHANGES[change]
    plan = plan_of(description.units, WORLD, "zero3")
    units = (replace(unit, **changes) if ".layers." in unit.fqn and part in unit.fqn else unit for unit in plan.units)
    plan = replace(plan, units=tuple(units), micro_batch_size=2)
    estimate = estimate_memory(description, plan.layouts(description), WORLD, JOB, plan.batch)
    simulated = simulate(model, plan, description=description, job=JOB, **CUDA)
    assert estimate.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.01)
