"""Each process takes a GPU of its own, and segments that expand where nobody has said otherwise (CUDA is played)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed import device as module
from hf_osdp.distributed.device import own_gpu, prefer_expandable_segments
from hf_osdp.distributed.mesh import collective_device
from hf_osdp.measurement.machine import measuring_device
from hf_osdp.preparation.preflight import device_memory
from hf_osdp.sharding import environment

CURRENT = "PYTORCH_ALLOC_CONF"
VARIABLES = (CURRENT, "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """Their number, and the current one."""
    played = SimpleNamespace(count=1, current=0)

    def set_device(device: int | torch.device) -> None:
        index = device if isinstance(device, int) else device.index
        assert index < played.count, "invalid device ordinal"
        played.current = index

    properties = SimpleNamespace(name="GPU", total_memory=2**30)
    for name, function in {
        "is_available": lambda: True, "device_count": lambda: played.count, "current_device": lambda: played.current,
        "set_device": set_device, "mem_get_info": lambda device: (2**30, 2**30), "memory_reserved": lambda device: 0,
        "get_device_name": lambda device: "GPU", "get_device_properties": lambda device: properties,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return played


@pytest.fixture
def form(monkeypatch):
    """A process group of one rank that counts as NCCL's."""

    def formed(device_id: int | None = None) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        if device_id is not None:  # as init_process_group(device_id=...) leaves it
            monkeypatch.setattr(type(dist.group.WORLD), "bound_device_id", torch.device("cuda", device_id))

    yield formed
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("count", "current", "local_rank", "has_group", "expected"), [
    (8, 0, "3", False, 3), (1, 0, "3", False, 0), (8, 5, "3", False, 5), (8, 2, None, False, 2),
    (8, 0, None, False, 0), (8, 0, "3", True, 0), (8, 2, "3", True, 2),
])  # fmt: skip
def test_own_gpu_without_group_is_that_of_local_rank(
    gpus, form, monkeypatch, count, current, local_rank, has_group, expected
):
    gpus.count, gpus.current = count, current
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if has_group:
        form()
    assert own_gpu() == torch.device("cuda", expected)
    assert gpus.current == expected


@pytest.mark.parametrize(
    "choose",
    [environment.training_device, collective_device, lambda: measuring_device("cuda"), lambda: device_memory("cuda")],
)
def test_all_devices_are_that_of_group_formed_with_device_id(gpus, form, choose):
    gpus.count = 8
    form(device_id=3)
    choose()
    assert gpus.current == 3


@pytest.mark.parametrize(
    ("variable", "before"), [(CURRENT, ""), *((name, "max_split_size_mb:512") for name in VARIABLES)]
)
def test_expandable_segments_are_set_once_beside_other_settings(monkeypatch, variable, before):
    """In a torch that is built with CUDA and has not begun to use it."""
    told: list[str] = []
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: told[-1] if told else "", raising=False)
    monkeypatch.setenv(variable, before)
    prefer_expandable_segments()
    prefer_expandable_segments()
    assert told == [os.environ[variable]] == [f"{before},expandable_segments:True".lstrip(",")]
