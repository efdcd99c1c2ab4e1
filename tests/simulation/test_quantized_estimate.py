"""Estimated peak of models whose base is in 4 bits against FSDP2's real step on fake tensors, under the plans that the
search finds.
"""

from __future__ import annotations

from itertools import product

import pytest
from transformers import GPT2Config, LlamaConfig

from hf_osdp.modeling.build import build_on_meta, with_lora
from hf_osdp.modeling.quantized import quantize
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.preparation.simulate import simulate
from hf_osdp.tracing.describe import describe
from tests.helpers.problems import problem

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
pytest.importorskip("peft", reason="the extra peft is not installed")

TOKENS, SAMPLES = 256, 8
MODELS = {
    "llama": LlamaConfig(num_hidden_layers=6, hidden_size=1024, intermediate_size=2816, num_attention_heads=16,
                         vocab_size=8000),
    "gpt2": GPT2Config(n_layer=6, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}  # fmt: skip
EVERYDAY = ("llama", "bf16", "half way")
CASES = list(product(MODELS, ("no", "bf16"), ("least", "half way", "none")))


@pytest.mark.parametrize(
    ("name", "precision", "limit"),
    [pytest.param(*case, marks=() if case == EVERYDAY else pytest.mark.slow) for case in CASES],
)
def test_peak_with_a_base_in_4_bits(name, precision, limit):
    hardware, compute = preset("rtx-4090", devices_per_node=4), Precision.named(precision)
    model = build_on_meta(MODELS[name])
    quantize(model, "nf4", compute.compute)
    model = with_lora(model, 8)
    description = describe(model, sequence_length=TOKENS, compute_dtype=compute.compute, device_type="cuda")
    job = TrainingJob(
        global_batch_size=SAMPLES * hardware.world_size, micro_batch_size=SAMPLES, precision=compute
    )  # fmt: skip
    ends = [least_memory(problem(description, hardware, job, strategy=strategy)) for strategy in ("osdp", "ddp")]
    found = search(
        problem(description, hardware, job, {"least": ends[0], "half way": sum(ends) // 2, "none": 2**40}[limit])
    )
    simulated = simulate(model, found.plan, description=description, job=job, device_type="cuda").peak_bytes
    assert found.memory.peak_bytes == pytest.approx(simulated, rel=0.002)
