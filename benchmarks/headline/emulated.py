"""An emulated link: collectives send nothing, and keep FSDP2's communication streams busy for as long as the link
would take.

FSDP2 and the device then decide what overlaps with compute and what waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from hf_osdp.modeling.units import modules_by_name
from hf_osdp.planner.cost.collectives import collective_seconds, replicate_ring, sharded_seconds
from hf_osdp.planner.hardware import Collective, Hardware
from hf_osdp.planner.plan import Plan

_CALIBRATION_CYCLES, _CALIBRATIONS = 20_000_000, 7


class Hold(Protocol):
    """Callable that keeps the emulated link busy."""

    def __call__(self, collective: Collective, seconds: float) -> None:
        """Keep the current stream busy for `seconds`, as the collective would."""
        ...

    def settle(self) -> None:
        """Calibrate after the warm-up; later steps count."""
        ...


class CudaHold:
    """Keep the current stream busy with one spinning thread. There is one link, so collectives of several streams wait
    for each other, as on a real link.

    `torch.cuda._sleep` counts clock cycles of the device, whose clock slows down under load, so every hold is measured
    by events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_per_s = self._calibrated()
        self._free: torch.cuda.Event | None = None
        self._holds: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, collective: Collective, seconds: float) -> None:
        if seconds <= 0:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._free is not None:
            stream.wait_event(self._free)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        torch.cuda._sleep(int(seconds * self._cycles_per_s))
        ended.record(stream)
        self._free = ended
        self._holds.append((seconds, began, ended))

    def settle(self) -> None:
        """Calibrate with the clock rate measured so far."""
        if self._holds:
            self._cycles_per_s /= 1 + self.error()

    def error(self) -> float:
        """Return the relative error of the holds since the last call; positive if they were too long."""
        torch.cuda.synchronize(self._device)
        asked = sum(seconds for seconds, _, _ in self._holds)
        taken = sum(began.elapsed_time(ended) / 1e3 for _, began, ended in self._holds)
        self._holds.clear()
        return taken / asked - 1 if asked else 0.0

    def _calibrated(self) -> float:
        """Return the cycles per second: the median of a few holds on the idle device."""
        rates = []
        for _ in range(_CALIBRATIONS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)
            ended.record()
            torch.cuda.synchronize(self._device)
            rates.append(_CALIBRATION_CYCLES / (began.elapsed_time(ended) / 1e3))
        return statistics.median(rates)


class _Allocating:
    """Allocate buffers from torch's allocator, as FSDP2's own collectives do."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class HeldAllGather(_Allocating, AllGather):
    """All-gather in which every rank's shard is this rank's; the output is written, and is finite."""

    def __init__(self, hardware: Hardware, hold: Hold) -> None:
        self._hardware, self._hold = hardware, hold

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Run on the current stream; there is no work to wait for."""
        size = group.size()
        output_tensor.view(size, -1)[1:] = input_tensor.view(1, -1)  # the first row, rank 0's, is the input itself
        self._hold(
            Collective.ALL_GATHER,
            sharded_seconds(self._hardware, Collective.ALL_GATHER, size, 1, output_tensor.nbytes),
        )


class HeldReduceScatter(_Allocating, ReduceScatter):
    """Reduce-scatter that returns this rank's part, as if the other ranks had the same values."""

    def __init__(self, hardware: Hardware, hold: Hold) -> None:
        self._hardware, self._hold = hardware, hold

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Run on the current stream."""
        output_tensor.copy_(input_tensor.view(-1)[: output_tensor.numel()].view_as(output_tensor))
        seconds = sharded_seconds(self._hardware, Collective.REDUCE_SCATTER, group.size(), 1, input_tensor.nbytes)
        self._hold(Collective.REDUCE_SCATTER, seconds)


def hold_link(model: nn.Module, plan: Plan, hardware: Hardware, hold: Hold) -> None:
    """Install the emulated link in a sharded model, whose process group must send nothing (`fake`) and be that of rank
    0.

    Args:
        model: sharded by `apply_plan`; plans for several nodes are not emulated.
        plan: the plan of the model.
        hardware: its links are emulated.
        hold: keeps the streams busy.

    Raises:
        ValueError: the plan has collectives in two stages.
    """
    modules = modules_by_name(model)
    for unit in plan.units:
        if unit.two_stage:
            raise ValueError(
                f"Unit {unit.fqn or '(root)'!r} has collectives in two stages; this link is that of one node."
            )
        module = modules[unit.module_names[0]]
        if not isinstance(module, FSDPModule):
            continue
        if unit.shard_size > 1:
            module.set_custom_all_gather(HeldAllGather(hardware, hold))
            module.set_custom_reduce_scatter(HeldReduceScatter(hardware, hold))
        if unit.shard_size < plan.world_size:
            module.set_all_reduce_hook(_all_reduce(hardware, unit.shard_size, hold))


def _all_reduce(hardware: Hardware, shard_size: int, hold: Hold) -> Callable[[torch.Tensor], None]:
    """Return the hook that FSDP2 calls on its all-reduce stream, after its own all-reduce, which sends nothing."""
    ring = replicate_ring(hardware, shard_size)
    return lambda reduced: hold(
        Collective.ALL_REDUCE, collective_seconds(hardware, Collective.ALL_REDUCE, ring, reduced.nbytes)
    )
