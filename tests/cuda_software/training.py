"""Small trainings of ours, on the device or on the host, in processes with a group of both kinds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed.mesh import Meshes
from tests.helpers.distributed import run_ranks
from tests.helpers.training import Case, Trained
from tests.helpers.training import train as train_case

# Else the question whether there is a device, asked before ranks are forked, forbids them to use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
LATE_MS = 200


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(Case):
    """A training of the same kernels on both devices."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw
    with_states: bool = False


def train(variant: Case, device_type: str, **options: Any) -> Trained:
    """Train this rank's part on `"cuda"` or `"cpu"`; rank 0 has the parameters."""
    device = f"cuda:{torch.cuda.current_device()}" if device_type == "cuda" else "cpu"
    case = replace(variant, world=dist.get_world_size())
    return train_case(case, meshes=Meshes(device_type), device=device, **options)


def on_devices(
    fn: Callable[..., Any], processes: int, *args: Any, late: str = "", sanitizes: bool = False, eager: bool = False,
    joins: bool = True, memory: str = "8G",
    env: Mapping[str, str] | None = None, timeout_s: float = 120.0,
) -> list[Any]:  # fmt: skip
    """Call `fn(*args)` as `run_ranks` does, in processes with a device each, in a group that is NCCL's on devices and
    gloo's on the host; without `joins` the group is not formed.

    `late` says which streams are late by LATE_MS (README.md): "all", "main", "side", or none. With `sanitizes` torch's
    CUDA sanitizer raises where it sees a race; with `eager` communicators are made at once and split. Raises
    RankFailure also where the device could not compute an operator's values.
    """
    variables = {
        "FAKE_CUDA_DEVICES": str(processes), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes))),
        "FAKE_CUDA_LATENCY_MS": str(LATE_MS if late else 0), "FAKE_CUDA_LATE": late, "FAKE_CUDA_MEM": memory,
        **(env or {}),
    }  # fmt: skip
    how = {"sanitizes": sanitizes, "eager": eager, "joins": joins, "timeout_s": timeout_s}
    return run_ranks(_in_group, processes, fn, args, how, init=False, env=variables, timeout_s=timeout_s)


def _in_group(fn: Callable[..., Any], args: tuple[Any, ...], how: dict[str, Any]) -> Any:
    import cuda_software

    if how["sanitizes"]:
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if how["joins"]:
        timeout = datetime.timedelta(seconds=how["timeout_s"] + 60)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device if how["eager"] else None)
    result = fn(*args)
    missing = cuda_software.failures()
    assert not missing, f"the device has no values of:\n{missing}"
    return result
