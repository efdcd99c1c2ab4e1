"""The machine as an earlier start measured it, so that the next start does not wait for it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import find_topology
from ..distributed.process_group import all_gather_objects
from ..measurement.machine import device_name, measure_hardware, measuring_device, with_memory_of_now
from ..measurement.timing import usable_cores
from ..planner.files import plain, validated, write_whole
from ..planner.hardware import Hardware
from ..reading import read_json
from .description_cache import cache_folder, code_hash

MEASURED_EARLIER = "measured earlier"
"""How the source of such hardware begins."""
_MOST_AGE_S = 24 * 3600
"""Machines drift."""


def measured_once(*, device_type: str, seconds: float) -> Hardware:
    """Measure the machine, or take what a start within the last day measured on the same one, with the memory of now. Collective.

    The same are each rank's host, device, threads and cores, and the code. Rank 0 has the file, in the folder of `describe_once`. What is
    measured while more is to be done than there are cores is not kept.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        seconds: as `measure_hardware` takes them.

    Raises:
        Exception: as `measure_hardware`.
    """
    device = measuring_device(device_type)
    ranks = all_gather_objects((platform.node(), device_name(device), usable_cores()))
    name = hashlib.sha256(repr((code_hash(), seconds, find_topology(), ranks)).encode()).hexdigest()[:32]
    folder = cache_folder()
    path = None if folder is None else folder / "machines" / f"{name}.json"
    found = on_rank_zero(lambda: _read(path))
    if found is None:
        is_busy = os.getloadavg()[0] > usable_cores()
        hardware = measure_hardware(device_type=device_type, seconds=seconds)
        on_rank_zero(lambda: None if is_busy else _write(path, hardware))
        return hardware
    text, age_s = found
    hardware = with_memory_of_now(validated(Hardware, json.loads(text), ValueError), device)
    ago = f"{age_s / 3600:.0f} h" if age_s >= 5400 else f"{age_s / 60:.0f} min"
    source = f"{MEASURED_EARLIER}, {ago} ago; OSDP_CACHE=0 measures it anew"
    return replace(hardware, device=replace(hardware.device, source=source))


def _read(path: Path | None) -> tuple[str, float] | None:
    """Return a file's content and age in seconds; None where there is none that can be used."""
    with suppress(OSError, ValueError):
        if path is not None and 0 <= (age_s := time.time() - path.stat().st_mtime) < _MOST_AGE_S:
            content = read_json(path, "measured machine")
            validated(Hardware, content, ValueError)
            return json.dumps(content), age_s
    return None


def _write(path: Path | None, hardware: Hardware) -> None:
    with suppress(OSError):  # a folder that cannot be written keeps nothing
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(plain(hardware)))
