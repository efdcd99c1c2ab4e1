"""Batch norms, in lower precision; `cases/architectures.py` trains many kinds in float64."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainingArguments

from hf_osdp import OSDPConfig, Trainer
from hf_osdp.errors import CheckpointingError
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import DType
from hf_osdp.planner.placement import Activations, activation_choices
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.sharding.environment import prepare_model
from hf_osdp.tracing.describe import describe
from tests.helpers.architectures import tiny_architecture
from tests.helpers.problems import problem


@pytest.mark.on_ranks(2, shared=True)
def test_batch_norm_stays_in_float32():
    """Weights, running means and gradients, while inputs and outputs are in bf16."""
    model = OptimalShardedDataParallel(
        tiny_architecture("ResNetForImageClassification").float(),
        {"sequence_length": 1, "global_batch_size": 8, "hardware": "cpu", "strategy": "fsdp"}, mixed_precision="bf16",
    )  # fmt: skip
    norms, seen = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)], set()
    for module in norms:
        module.register_forward_hook(
            lambda module, args, output: seen.add((module.weight.dtype, module.running_mean.dtype, args[0].dtype,
                                                   output.dtype))
        )  # fmt: skip
    model.backward(model(pixel_values=torch.randn(4, 3, 32, 32), labels=torch.tensor([0, 1, 2, 3])).loss)
    assert seen == {(torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)}
    assert norms and all(module.weight.grad.dtype is torch.float32 for module in norms)


class FrozenBatchNorm2d(torch.nn.Module):
    """As detection backbones have it: buffers in float32, which raise what it returns to float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1, channels, 1, 1), 0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


@pytest.mark.on_ranks(2, shared=True)
def test_trainer_in_bf16_trains_a_model_with_frozen_norms(tmp_path):
    model = tiny_architecture("ResNetForImageClassification").float()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.BatchNorm2d):
                setattr(module, name, FrozenBatchNorm2d(child.num_features))
    rows = [{"pixel_values": torch.randn(3, 32, 32), "labels": number % 4} for number in range(4)]
    args = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, bf16=True, use_cpu=True, report_to="none"
    )
    osdp = OSDPConfig(strategy="fsdp", hardware="cpu", time_blocks=False)
    assert Trainer(model, args, train_dataset=rows, osdp=osdp).train().training_loss > 0


def test_batch_norms_are_own_units_under_low_precision_alone():
    model = tiny_architecture("ResNetForImageClassification").float()
    dtypes = (None, DType.BFLOAT16)
    plain, low = (describe(model, sequence_length=1, compute_dtype=one, recomputation=False) for one in dtypes)
    assert not any(unit.keeps_dtype for unit in plain.units)
    kept = {parameter.name for unit in low.units for parameter in unit.parameters if parameter.keeps_dtype}
    norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert kept == {f"{name}.{leaf}" for name in norms for leaf in ("weight", "bias")}
    assert all(unit.keeps_dtype == parameter.keeps_dtype for unit in low.units for parameter in unit.parameters)


def test_blocks_with_batch_norm_are_not_recomputed_but_offloaded():
    model = tiny_architecture("ResNetForImageClassification").float()
    description = describe(model, sequence_length=1, device_type="cuda")
    assert not description.recomputable
    assert any(Activations.OFFLOAD in choices for choices in activation_choices(description))
    job = TrainingJob(global_batch_size=8, recompute=True)
    with pytest.raises(ValueError, match="no block of this model can be recomputed: it has batch normalisation"):
        search(problem(description, preset("h100", devices_per_node=2), job, 2**40))
    with pytest.raises(CheckpointingError, match="has batch normalisation, whose running statistics"):
        describe(model, sequence_length=1, activation_checkpointing=True)


def test_a_model_in_bfloat16_gets_statistics_in_float32():
    model = tiny_architecture("ResNetForImageClassification").to(torch.bfloat16)
    prepare_model(model, Precision.named("bf16"))
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}


def test_batch_norms_that_share_a_weight_stay_together():
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    blocks[1][1].weight = blocks[0][1].weight
    units = find_units(torch.nn.ModuleDict({"blocks": blocks}), ["Sequential"], low_precision=True)
    names = [unit.module_names for unit in units]
    assert ("blocks.0.1", "blocks.1.1") in names and ("blocks.0.1",) not in names and ("blocks.1.1",) not in names
