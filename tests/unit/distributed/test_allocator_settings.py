"""`expandable_segments` is set where nobody has said anything, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from hf_osdp.distributed import allocator_settings as module
from hf_osdp.distributed.allocator_settings import expands_segments, prefer_expandable_segments


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What the allocator is told, in a torch that is built with CUDA and has not begun to use it."""
    told: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: told[-1] if told else "", raising=False)
    return told


def test_expandable_segments_are_set_where_nothing_is(calls):
    environment: dict[str, str] = {}
    assert prefer_expandable_segments(environment)
    assert calls == ["expandable_segments:True"]
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert expands_segments(environment)
    assert not prefer_expandable_segments(environment) and len(calls) == 1


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_other_settings_of_the_user_stay(calls, variable):
    environment = {variable: "max_split_size_mb:512"}
    assert prefer_expandable_segments(environment)
    assert environment == {variable: "max_split_size_mb:512,expandable_segments:True"} and calls == [environment[variable]]


@pytest.mark.parametrize(
    ("settings", "expands"),
    [("expandable_segments:False", False), ("expandable_segments:True", True), ("backend:cudaMallocAsync", True)],
)
def test_what_the_user_chose_is_left_and_known(calls, settings, expands):
    environment = {"PYTORCH_CUDA_ALLOC_CONF": settings}
    assert not prefer_expandable_segments(environment)
    assert not calls and environment == {"PYTORCH_CUDA_ALLOC_CONF": settings}
    assert expands_segments(environment) is expands


def test_setting_made_by_a_call_counts(calls):
    calls.append("expandable_segments:False")
    assert not prefer_expandable_segments({}) and not expands_segments({})


def test_allocator_in_use_is_left_alone(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not prefer_expandable_segments({}) and not calls
    assert not expands_segments({})


def test_torch_without_cuda_is_left_alone(calls, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not prefer_expandable_segments({}) and not calls
    assert expands_segments({})
