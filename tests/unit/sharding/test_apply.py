"""Where one process's plan is laid out; torch.cuda and the group's backend are played."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed import mesh
from hf_osdp.modeling.units import find_units
from hf_osdp.sharding import apply, environment
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model


class Asked(Exception):
    """Meshes were made for this device."""


def test_units_on_the_host_beside_one_gpu_get_meshes_of_that_gpu(monkeypatch):
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
