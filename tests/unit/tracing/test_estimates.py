"""One process: the estimate, the simulation and real steps hold the same bytes, also under autocast."""

import pytest
import torch

from hf_osdp.modeling.batch import training_batch
from hf_osdp.planner.description import DType
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.preparation.simulate import simulate
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.memory_tracker import MemoryTracker
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but

TOKENS, SAMPLES = 32, 16
SMALL = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "BertForMaskedLM": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "LlamaForCausalLM": {},
    "T5ForConditionalGeneration": {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    "BartForConditionalGeneration": {"dropout": 0.0, "max_position_embeddings": TOKENS},
    "ViTForImageClassification": {"hidden_dropout_prob": 0.0},
}


def inputs_of(model: torch.nn.Module):
    """Batches without a mask, which models leave out where all of it is 1, if they can read it."""
    make = training_batch(model, TOKENS)
    return lambda samples: {name: value for name, value in make(samples).items() if name != "attention_mask"}


def measured_peak(model: torch.nn.Module, autocast: bool) -> int:
    """Most live bytes in the second step of a plain loop, with autocast as Accelerate's."""
    forward = model.forward
    if autocast:
        operations = pytest.importorskip("accelerate.utils.operations")
        forward = operations.convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = inputs_of(model)(SAMPLES)

    def step() -> None:
        loss = forward(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    with MemoryTracker(block_bytes=1) as live:
        tensors = [value for value in (*states, *batch.values()) if isinstance(value, torch.Tensor)]
        live.track([*model.parameters(), *model.buffers(), *tensors])
        live.reset_peak()
        step()
    return live.peak_bytes


def estimates(model: torch.nn.Module, autocast: bool, device_type: str) -> tuple[int, int]:
    """Peaks by estimate and by simulation."""
    job = TrainingJob(
        global_batch_size=SAMPLES, micro_batch_size=SAMPLES,
        precision=Precision.named("bf16" if autocast else "no", autocast=autocast),
        optimizer=OptimizerSpec(step=OptimizerStep.FOR_LOOP), recompute=False,
    )  # fmt: skip
    inputs = inputs_of(model)
    options = {"compute_dtype": DType.BFLOAT16 if autocast else None, "autocast": autocast, "recomputation": False}
    description = describe(model, sequence_length=TOKENS, device_type=device_type, inputs=inputs, **options)
    found = search(problem(description, preset("cpu"), job, 2**40))
    simulation = simulate(model, found.plan, description=description, job=job, device_type=device_type, inputs=inputs)
    return found.memory.peak_bytes, simulation.peak_bytes


@pytest.mark.parametrize(
    ("name", "autocast"),
    slow_but([*((name, False) for name in SMALL), ("GPT2LMHeadModel", True), ("BertForMaskedLM", True)],
        daily=[("GPT2LMHeadModel", True), ("LlamaForCausalLM", False)]),
)  # fmt: skip
def test_estimate_is_what_a_real_step_holds(real_model, name, autocast):
    model = real_model(name, **SMALL[name]).train()
    model.config.use_cache = False
    found = estimates(model, autocast, "cpu")
    measured = measured_peak(model, autocast)
    assert all(0.98 * measured <= peak <= 1.05 * measured for peak in found)
    if autocast and name == "GPT2LMHeadModel":  # on CUDA, normalisation, softmax and loss are in float32
        on_cuda = estimates(model, autocast, "cuda")
        assert on_cuda[0] == pytest.approx(on_cuda[1], rel=0.02)
        assert on_cuda[0] > 1.05 * found[0]
