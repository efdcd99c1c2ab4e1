"""The device itself: its memory, its values, and what guards its libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from .training import on_devices

MIB = 1 << 20
FIXED, EXPANDABLE = {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def filled():
    """Blocks until the device is full: how many of 40 MiB, what the error says, what is left once they are gone."""
    blocks = []
    with pytest.raises(torch.OutOfMemoryError) as error:
        while True:
            blocks.append(torch.empty(40 * MIB, dtype=torch.uint8, device="cuda"))
    reserved = torch.cuda.memory_reserved()
    found = len(blocks), str(error.value)
    blocks.clear()
    torch.cuda.empty_cache()
    return *found, reserved, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()


@pytest.mark.parametrize("segments", [FIXED, EXPANDABLE], ids=["fixed", "expandable"])
def test_device_is_full_at_its_limit_and_empty_again(segments):
    [(blocks, message, reserved, after, (free, total))] = on_devices(filled, 1, memory="400M", env=segments)
    assert blocks == 10 and "total capacity of 400.00 MiB" in message
    assert reserved == 400 * MIB and after == 0 and free == total == 400 * MIB


def test_libraries_of_nvidia_over_the_device_are_noticed():
    import cuda_software

    other = cuda_software.SITE / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    other.parent.mkdir(parents=True)
    try:
        other.write_bytes(b"NVIDIA's")
        ended = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, timeout=60)
    finally:
        shutil.rmtree(other.parents[1])
    assert ended.returncode and "python -m tests.cuda_software build --into" in ended.stderr
