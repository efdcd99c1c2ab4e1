"""All measurements of a machine, and of a model's blocks on it, as one `Profile`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from ..planner.description import DType
from ..planner.job import divisors
from ..planner.profile import HostLink, Profile
from .block_times import measure_block_times
from .host_link import measure_host_link
from .machine import device_name, measure_hardware, measuring_device
from .synchronize import distributed, world_size

_PACKAGES = ("hf_osdp", "torch", "transformers")


def measure_profile(
    *,
    device_type: str,
    seconds: float = 10.0,
    model_or_config: Any = None,
    sequence_length: int | None = None,
    micro_batch_sizes: Sequence[int] = (1, 2, 4),
    compute_dtype: DType | None = None,
    activation_checkpointing: bool = False,
    auto_class: Any = None,
    block_classes: Sequence[str] | None = None,
) -> Profile:
    """Measure this machine. Where torch.distributed is initialized every rank must call this at the same time.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        seconds: about how long to measure: with a model half of it goes to blocks; setting up comes on top.
        model_or_config: also time this model's blocks; None measures the machine alone.
        sequence_length: tokens of one sample, for the model.
        micro_batch_sizes: sizes to time the model's blocks at.
        compute_dtype: dtype that the model computes in; None keeps its parameters' own.
        activation_checkpointing: time blocks as they are when their activations are recomputed.
        auto_class: for a configuration, which class to build.
        block_classes: class names of the blocks; None finds them.

    Returns:
        The profile, the same on every rank.

    Raises:
        ValueError: the device type is not known, `seconds` is not positive, or a model comes without a sequence length.
        HardwareError: the device is missing, or ranks do not fill the nodes evenly.
        ProfileError: the model does not fit, or cannot be timed.
    """
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds} must be positive and finite.")
    if model_or_config is not None and sequence_length is None:
        raise ValueError("A model's blocks are timed at one sequence length; give sequence_length.")
    device = measuring_device(device_type)
    machine_s = seconds if model_or_config is None else seconds / 2
    hardware = measure_hardware(  # compute, collectives, FSDP2's own work
        device_type=device_type, seconds=machine_s / 2.4, group_sizes=divisors(world_size())
    )  # fmt: skip
    host = hardware.host
    if host is None:
        host_link = measure_host_link(device, 0.05 * machine_s)
    else:
        host_link = HostLink(to_device_bytes_per_s=host.to_device_bytes_per_s, to_host_bytes_per_s=host.to_host_bytes_per_s)
    segments, name = (), ""
    if model_or_config is not None:
        segments = measure_block_times(
            model_or_config, device=device, sequence_length=sequence_length, micro_batch_sizes=micro_batch_sizes,
            compute_dtype=compute_dtype, activation_checkpointing=activation_checkpointing, seconds=seconds / 2,
            auto_class=auto_class, block_classes=block_classes,
        )  # fmt: skip
        config = getattr(model_or_config, "config", model_or_config)
        name = getattr(config, "_name_or_path", "") or type(model_or_config).__name__
    return _from_rank_zero(
        Profile(
            hardware=hardware,
            segments=segments,
            host_link=host_link,
            device_names=_device_names(device),
            model=name,
            versions=_versions(),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ),
        device,
    )


def _device_names(device: torch.device) -> tuple[str, ...]:
    """One a rank."""
    names: list[Any] = [device_name(device)] * world_size()
    if distributed():
        dist.all_gather_object(names, names[0])
    return tuple(names)


def _from_rank_zero(profile: Profile, device: torch.device) -> Profile:
    """Dates and versions may differ between ranks: rank 0's count."""
    if not distributed():
        return profile
    texts = [profile.to_json()]
    dist.broadcast_object_list(texts, src=0, device=device)
    return Profile.from_json(texts[0])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
