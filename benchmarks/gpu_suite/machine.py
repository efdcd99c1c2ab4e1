"""The machine on which results were made."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "accelerate", "ortools", "pydantic")


def machine(*, on_cpu: bool) -> dict[str, Any]:
    """Return versions and hardware without creating a CUDA context."""
    import psutil

    versions = {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}
    host = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    if on_cpu or not torch.cuda.is_available():
        return {"versions": versions, "hardware": f"CPU, {host}"}
    versions |= {"CUDA": torch.version.cuda or "", "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return {"versions": versions, "hardware": f"{_gpu()}; host: {host}"}


def _gpu() -> str:
    """Return name, memory and driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "a CUDA device (nvidia-smi did not answer)"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
