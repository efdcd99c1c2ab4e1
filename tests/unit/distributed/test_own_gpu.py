"""Each process takes a GPU of its own, however it was launched; torch.cuda is played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp.cli import profile_command
from hf_osdp.distributed import consensus as agree
from hf_osdp.distributed.device import own_gpu
from hf_osdp.distributed.mesh import collective_device
from hf_osdp.measurement.machine import measuring_device
from hf_osdp.planning.preflight.run import device_memory
from hf_osdp.sharding import environment


class Gpus:
    """What torch.cuda tells of the GPUs that a process sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.current = 1, 0
        properties = SimpleNamespace(name="GPU", total_memory=2**30)
        for name, played in {
            "is_available": lambda: True, "device_count": lambda: self.count, "current_device": lambda: self.current,
            "set_device": self.set, "mem_get_info": lambda device: (2**30, 2**30), "get_device_name": lambda device: "GPU",
            "memory_reserved": lambda device: 0, "get_device_properties": lambda device: properties,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, played)

    def set(self, device: int | torch.device) -> None:
        index = device if isinstance(device, int) else device.index
        assert index < self.count, "invalid device ordinal"
        self.current = index


@pytest.fixture
def gpus(monkeypatch) -> Gpus:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return Gpus(monkeypatch)


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


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "expected"), [(8, 0, "3", 3), (1, 0, "3", 0), (8, 5, "3", 5), (8, 2, None, 2), (8, 0, None, 0)]
)
def test_before_a_group_the_launcher_chooses_among_the_visible(gpus, monkeypatch, count, current, local_rank, expected):
    gpus.count, gpus.current = count, current
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert own_gpu() == torch.device("cuda", expected)
    assert gpus.current == expected


def test_a_group_formed_without_a_device_leaves_torchs_choice(gpus, form, monkeypatch):
    gpus.count, gpus.current = 8, 2
    monkeypatch.setenv("LOCAL_RANK", "3")
    form()
    assert own_gpu().index == gpus.current == 2


@pytest.mark.parametrize(
    "choose",
    [
        environment.training_device, collective_device, lambda: measuring_device("cuda"), lambda: device_memory("cuda"),
        lambda: agree._own_device("cuda"),
    ],
)  # fmt: skip
def test_everybody_takes_the_device_that_the_group_was_formed_with(gpus, form, choose):
    gpus.count = 8
    form(device_id=3)
    choose()
    assert gpus.current == 3


def test_a_group_of_one_visible_gpu_is_formed_at_any_local_rank(gpus, monkeypatch):
    formed = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: formed.append(backend))
    environment.form_process_group(needed=True)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with profile_command._process_group("cuda"):
        pass
    assert formed == ["cpu:gloo,cuda:nccl"] * 2
    assert gpus.current == 0
