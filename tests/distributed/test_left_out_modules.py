"""Models whose ranks run different modules train under a mixed plan as DDP with `find_unused_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.small_models import InDouble
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.build import disable_cache
from hf_osdp.modeling.units import find_units
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.tracing.pictures import UsualBatch
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.sampling import slow_but
from tests.helpers.vision import tiny_vision

STEPS = 4
_SPEECH = {
    "encoder_layers": 3, "decoder_layers": 3, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "dropout": 0.0, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 100, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "max_source_positions": 30,
    "max_target_positions": 40, "num_mel_bins": 8, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5,
}  # fmt: skip
_WAVE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 20,
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "layerdrop": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "apply_spec_augment": False,
}  # fmt: skip
_EXPERTS = {
    "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "num_experts": 8,
    "vocab_size": 100, "expert_capacity": 64, "dropout_rate": 0.0, "router_jitter_noise": 0.0,
    "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "decoder_start_token_id": 0,
}  # fmt: skip


def of_class(name: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls._from_config(cls.config_class(**sizes)).double().train()


def frozen_tower(name: str) -> nn.Module:
    """The projection between tower and text trains."""
    model = tiny_vision(name)
    for part, parameter in model.named_parameters():
        parameter.requires_grad_(not part.startswith(("model.vision_tower", "model.visual.blocks")))
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "llava": lambda: tiny_vision("LlavaForConditionalGeneration"),
    "llava, frozen tower": lambda: frozen_tower("LlavaForConditionalGeneration"),
    "qwen2.5-vl": lambda: tiny_vision("Qwen2_5_VLForConditionalGeneration"),
    "qwen2.5-vl, frozen tower": lambda: frozen_tower("Qwen2_5_VLForConditionalGeneration"),
    "whisper": lambda: of_class("WhisperForConditionalGeneration", _SPEECH),
    "wav2vec2": lambda: of_class("Wav2Vec2ForCTC", _WAVE),
    "switch": lambda: of_class("SwitchTransformersForConditionalGeneration", _EXPERTS),
}


def batch_of(model: nn.Module, step: int, rank: int) -> dict[str, Any]:
    """Random inputs, in every second batch of a rank with pictures; in the first step no rank has any."""
    made = torch.Generator().manual_seed(100 * step + rank)
    images = int(step > 0 and (step + rank) % 2 == 0) if hasattr(model.config, "vision_config") else None
    length = 400 if model.main_input_name == "input_values" else 24
    batch = UsualBatch(model, length, images)(2)
    batch.pop("labels")
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=made, dtype=torch.float64)
        elif name in ("input_ids", "decoder_input_ids"):
            random = torch.randint(3, 90, value.shape, generator=made)
            batch[name] = torch.where(value < 99, random, value)
    return batch


def trains_as_ddp(name: str, layout: str) -> None:
    rank = dist.get_rank()
    model, expected = CASES[name](), CASES[name]()
    batches = [batch_of(model, step, rank) for step in range(STEPS)]
    disable_cache(model)
    disable_cache(expected)
    units = find_units(model)
    apply_plan(model, plan_of(units, dist.get_world_size(), layout), units, meshes=Meshes("cpu"), pin_memory=False)
    reference = DistributedDataParallel(expected, find_unused_parameters=True)
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.01, eps=1e-4, foreach=False)
        for one in (model, expected)
    ]
    unused: set[str] = set()
    with InDouble():
        for step, batch in enumerate(batches):
            losses = []
            for one in (model, reference):
                torch.manual_seed(10 * step + rank)  # LayerDrop's
                losses.append(one(**batch).logits.square().mean())
                losses[-1].backward()
            assert torch.allclose(*losses, rtol=0, atol=1e-12), (step, losses)
            for part, parameter in expected.named_parameters():
                found = model.get_parameter(part).grad
                assert (found is None) == (parameter.grad is None), (step, part)
                unused |= {part} if parameter.requires_grad and parameter.grad is None else set()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert unused, "no step left a module out on all ranks"
    found = full_state_dict(model)
    if rank == 0:
        for part, weight in expected.state_dict().items():
            torch.testing.assert_close(
                found[part], weight, rtol=0, atol=1e-12, msg=lambda text, part=part: f"{part}: {text}"
            )


@pytest.mark.parametrize("name", slow_but(CASES, daily=("llava, frozen tower", "whisper", "switch")))
def test_ranks_that_run_different_modules_train_as_ddp(name):
    run_ranks(trains_as_ddp, 2, name, "mixed", timeout_s=60, shared=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "everything"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_with_different_modules_train_as_ddp_in_other_layouts(name, layout):
    run_ranks(trains_as_ddp, 2, name, layout, timeout_s=60, shared=True)
