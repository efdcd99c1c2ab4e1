"""All measurements of a machine, and of a model's blocks on it, as one `Profile`."""

from __future__ import annotations

import platform
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import world_size
from ..planner.job import divisors
from ..planner.profile import HostLink, Profile, SegmentTimes
from .block_times import TimedModel, measure_block_times
from .machine import device_name, measure_hardware, measuring_device
from .rates import measure_host_link

_PACKAGES = ("hf_osdp", "torch", "transformers")


def measure_profile(*, device_type: str, seconds: float = 10.0, model: TimedModel | None = None) -> Profile:
    """Measure this machine. Collective where torch.distributed is initialized.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        seconds: about how long to measure: with a model half of it goes to blocks; setting up comes on top.
        model: also time this model's blocks; None measures the machine alone.

    Returns:
        The profile, the same on every rank.

    Raises:
        ValueError: the device type is not known, or `seconds` is not positive.
        HardwareError: the device is missing, or ranks do not fill the nodes evenly.
        ProfileError: the model does not fit, or cannot be timed.
    """
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds} must be positive and finite.")
    device = measuring_device(device_type)
    machine_s = seconds if model is None else seconds / 2
    hardware = measure_hardware(device_type=device_type, seconds=machine_s / 2.4, group_sizes=divisors(world_size()))
    host = hardware.host
    if host is None:
        host_link = measure_host_link(device, 0.05 * machine_s)
    else:
        host_link = HostLink(to_device_bytes_per_s=host.to_device_bytes_per_s, to_host_bytes_per_s=host.to_host_bytes_per_s)
    segments: tuple[SegmentTimes, ...] = ()
    name = ""
    if model is not None:
        segments = measure_block_times(model, device=device, seconds=seconds / 2)
        config = getattr(model.model_or_config, "config", model.model_or_config)
        name = getattr(config, "_name_or_path", "") or type(model.model_or_config).__name__
    names: list[str] = [device_name(device)] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(names, names[0])
    profile = Profile(
        hardware=hardware,
        segments=segments,
        host_link=host_link,
        device_names=tuple(names),
        model=name,
        versions=_versions(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    return Profile.from_json(on_rank_zero(profile.to_json))  # dates and versions may differ between ranks


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
