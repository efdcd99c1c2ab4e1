"""One process in bf16 under autocast: the estimate, the simulation and real steps hold the same bytes."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_osdp.modeling.batch import training_batch
from hf_osdp.planner.description import DType
from hf_osdp.planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planning.simulate import simulate
from hf_osdp.tracing.cuda_kernels import CudaKernels
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.memory_tracker import MemoryTracker
from tests.helpers.problems import problem

TOKENS, SAMPLES = 32, 16
SMALL = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "BertForMaskedLM": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def inputs_of(model: torch.nn.Module):
    """Batches without a mask, which models leave out where all of it is 1, if they can read it."""
    make = training_batch(model, TOKENS)
    return lambda samples: {name: value for name, value in make(samples).items() if name != "attention_mask"}


def measured_peak(model: torch.nn.Module) -> int:
    """Most live bytes in the second step of a plain loop under Accelerate's autocast."""
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


def estimates(model: torch.nn.Module, device_type: str) -> tuple[int, int]:
    """Peaks by estimate and by simulation."""
    job = TrainingJob(
        global_batch_size=SAMPLES, micro_batch_size=SAMPLES, precision=Precision.named("bf16", autocast=True),
        optimizer=OptimizerSpec(step=OptimizerStep.FOR_LOOP), recompute=False,
    )  # fmt: skip
    inputs = inputs_of(model)
    description = describe(
        model, sequence_length=TOKENS, compute_dtype=DType.BFLOAT16, autocast=True, device_type=device_type, recomputation=False,
        inputs=inputs,
    )  # fmt: skip
    found = search(problem(description, preset("cpu"), job, 2**40))
    simulation = simulate(model, found.plan, description=description, job=job, device_type=device_type, inputs=inputs)
    return found.memory.peak_bytes, simulation.peak_bytes


@pytest.mark.parametrize("name", SMALL)
def test_estimate_under_autocast_is_what_a_step_holds(real_model, name):
    model = real_model(name, **SMALL[name]).train()
    model.config.use_cache = False
    estimated, simulated = estimates(model, "cpu")
    measured = measured_peak(model)
    assert estimated == pytest.approx(measured, rel=0.02)
    assert simulated == pytest.approx(measured, rel=0.02)


def test_autocast_of_cuda_keeps_more_than_that_of_the_cpu(real_model):
    """Normalisation, softmax and loss are computed in float32 there."""
    model = real_model("GPT2LMHeadModel", **SMALL["GPT2LMHeadModel"]).train()
    on_cpu, (estimated, simulated) = estimates(model, "cpu")[0], estimates(model, "cuda")
    assert estimated == pytest.approx(simulated, rel=0.02)
    assert estimated > 1.05 * on_cpu


def test_operators_in_float32_are_those_of_cudas_autocast():
    value, weight = torch.randn(2, 4, 8, dtype=torch.bfloat16), torch.randn(8, 8)
    with CudaKernels(lambda flops: None):
        assert F.layer_norm(value, (8,)).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert {f(value).dtype for f in (torch.exp, lambda v: v**2, lambda v: v.softmax(-1), lambda v: F.layer_norm(v, (8,)))} == {
                torch.float32
            }
            assert {F.linear(value.float(), weight).dtype, torch.relu(value).dtype, (value * 2).dtype} == {torch.bfloat16}
            heads = torch.randn(2, 4, 16, 8)
            assert F.scaled_dot_product_attention(heads, heads, heads).dtype is torch.bfloat16


def kept_by_autograd(config, device: str, fused: bool) -> Counter:
    """Dtype and bytes of each storage that autograd keeps of a forward on fake tensors under the device's autocast."""
    transformers = pytest.importorskip("transformers")
    kept: dict[int, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device(device):
            model = transformers.GPT2LMHeadModel(config).train()
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        tokens = torch.zeros(2, TOKENS, dtype=torch.long, device=device)
        torch.set_autocast_enabled(device, True)  # `torch.autocast` wants a GPU
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.autocast_increment_nesting()
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: kept.setdefault(tensor.untyped_storage()._cdata, tensor), lambda tensor: tensor
            )
            with CudaKernels(lambda flops: None) if fused else nullcontext(), hooks:
                model(input_ids=tokens, labels=tokens)
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled(device, False)
    return Counter((tensor.dtype, tensor.untyped_storage().nbytes()) for key, tensor in kept.items() if key not in own)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA, whose autocast takes no fake tensors then")
def test_what_is_kept_under_cudas_autocast_is_what_torchs_own_keeps(configuration):
    config = configuration("GPT2LMHeadModel", **SMALL["GPT2LMHeadModel"], attn_implementation="eager", use_cache=False)
    assert kept_by_autograd(config, "cpu", fused=True) == kept_by_autograd(config, "cuda", fused=False)
