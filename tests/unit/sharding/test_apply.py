"""What becomes of a model before it is described or sharded: masters, caches, devices, and the meshes of one GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.distributed import mesh
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import DType
from hf_osdp.planner.training_job import Precision
from hf_osdp.sharding import apply, environment
from hf_osdp.sharding.environment import apply_tied, move_to_device, prepare_model, prepare_precision
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model
from tests.helpers.vision import tiny_vision


def test_model_is_prepared_with_float32_masters_and_without_cache():
    layer = nn.Linear(2, 2, dtype=torch.bfloat16)
    layer.bias.requires_grad_(False)
    prepare_precision(layer, Precision())
    assert layer.weight.dtype is torch.bfloat16
    prepare_precision(layer, Precision(compute=DType.BFLOAT16))
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.float32, torch.bfloat16)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    assert model.config.use_cache
    prepare_model(model, Precision())
    assert not model.config.use_cache
    assert model(input_ids=torch.zeros(1, 2, dtype=torch.long)).past_key_values is None
    prepare_model(nn.Linear(2, 2), Precision())  # has no configuration
    model = tiny_vision("LlavaForConditionalGeneration")  # its text part has the switch
    prepare_model(model, Precision())
    assert model(input_ids=torch.zeros(1, 2, dtype=torch.long)).past_key_values is None


class Asked(Exception):
    """Meshes were made for this device."""


def test_units_on_host_get_meshes_of_the_one_gpu(monkeypatch):
    """In fp32 nothing but offload needs a process group, so that it is formed while the plan is applied."""
    form = dist.init_process_group

    def gloo_as_nccl(backend: str, **options: object) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        form("gloo", **options)

    def meshes(device_type: str) -> None:
        raise Asked(device_type)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (environment, mesh):
        monkeypatch.setattr(module, "own_gpu", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(dist, "init_process_group", gloo_as_nccl)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(apply, "Meshes", meshes)
    monkeypatch.delenv("RANK", raising=False)
    model = tiny_model("gpt2")
    units = find_units(model)
    try:
        with pytest.raises(Asked, match="cuda"):
            apply.apply_plan(model, plan_of(units, 1, "everything"), units)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "model", [build_on_meta(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11)), tiny_model("gpt2")]
)
def test_tied_parameters_stay_tied_between_meta_and_device(model):
    assert model.transformer.wte.weight is model.lm_head.weight
    move_to_device(model, torch.device("cpu"), empty=True)
    assert model.transformer.wte.weight is model.lm_head.weight and model.lm_head.weight.device.type == "cpu"
    apply_tied(model, lambda tensor: tensor.to("meta"))
    assert model.transformer.wte.weight is model.lm_head.weight and model.lm_head.weight.is_meta
