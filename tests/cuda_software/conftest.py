"""Skips these tests in environments without the device."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def device() -> None:
    if importlib.util.find_spec("cuda_software") is None:
        pytest.skip("needs the device (tests/cuda_software/README.md), in whose environment these tests run")
