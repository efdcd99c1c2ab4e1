"""What the user of a plain loop asks for → the one plan that every rank runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ..planner.hardware import Hardware
from ..planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from ..planner.plan import Plan
from ..planner.presets import preset
from ..quantities import format_bytes, parse_bytes
from .agree import broadcast_plan, on_rank_zero
from .environment import training_device
from .given import check_given
from .mesh import world_size

if TYPE_CHECKING:
    from ..planner.search import SearchResult
    from ..profiling.batch import Inputs

_PLANNING_ONLY = ("strategy", "hardware", "optimizer", "inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The arguments of `OptimalShardedDataParallel`, which explains them; None is what was not said."""

    memory_limit: int | float | str | None
    sequence_length: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    strategy: str | None
    block_classes: tuple[str, ...] | None
    precision: Precision
    hardware: Hardware | str | None
    optimizer: OptimizerSpec | None
    inputs: Inputs | None

    def check(self, *, planning: bool) -> None:
        """Refuse what is missing for planning, or of no use without; before anything is changed.

        Raises:
            ValueError: an argument is missing, of no use, or not of its type.
        """
        if self.optimizer is not None and not isinstance(self.optimizer, OptimizerSpec):
            kind = type(self.optimizer).__name__
            raise ValueError(
                f"optimizer is of type {kind}; give an OptimizerSpec, and make the optimizer from the sharded model's parameters."
            )
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        if planning:
            if missing := [name for name in ("sequence_length", "global_batch_size") if getattr(self, name) is None]:
                raise ValueError(f"Planning needs {' and '.join(missing)}; pass them, or give a plan.")
        elif unused := [name for name in _PLANNING_ONLY if getattr(self, name) is not None]:
            raise ValueError(f"A given plan leaves no use for {' and '.join(unused)}; leave them out, or leave plan out to plan here.")

    def load(self, plan: Plan | str | Path) -> Plan:
        """The plan that was given, checked, the same on every rank. Collective.

        Raises:
            PlanError: it cannot be read, differs between ranks, or is not what is asked for.
        """

        def read() -> Plan:
            given = plan if isinstance(plan, Plan) else Plan.load(plan)
            check_given(
                given,
                memory_limit_bytes=None if self.memory_limit is None else parse_bytes(self.memory_limit),
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                sequence_length=self.sequence_length,
            )
            return given

        return broadcast_plan(on_rank_zero(read))

    def search(self, model: nn.Module) -> tuple[Plan, SearchResult | None]:
        """Measure together, describe and search on rank 0, and give every rank the plan; the result is rank 0's. Collective.

        Raises:
            InfeasibleError: no plan meets the limit.
            HardwareError: the hardware's name is not known.
            ValueError: sizes, limit and hardware do not fit together.
        """
        from ..planner.search import search
        from ..profiling.describe import describe

        device_type = training_device().type
        job = self._job(device_type)
        hardware = self._hardware(device_type)
        limit = self._limit_bytes(hardware)
        found: list[SearchResult] = []

        def find() -> Plan:
            description = describe(
                model,
                sequence_length=self.sequence_length,
                block_classes=self.block_classes,
                compute_dtype=self.precision.compute,
                device_type=device_type,
                inputs=self.inputs,
            )
            found.append(search(description, hardware, job, limit, strategy=self.strategy or "osdp"))
            return found[0].plan

        plan = broadcast_plan(on_rank_zero(find))
        return plan, found[0] if found else None

    def _job(self, device_type: str) -> TrainingJob:
        job = TrainingJob(
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            optimizer=self.optimizer or plain_adamw(device_type),
            micro_batch_size=self.micro_batch_size,
        )
        job.micro_batch_sizes(world_size())
        return job

    def _hardware(self, device_type: str) -> Hardware:
        if self.hardware is None:
            from ..profiling.machine import measure_hardware

            return measure_hardware(device_type=device_type)
        ranks = world_size()
        hardware = preset(self.hardware, devices_per_node=ranks) if isinstance(self.hardware, str) else self.hardware
        if hardware.world_size != ranks:
            raise ValueError(f"hardware has {hardware.world_size} devices, but {ranks} processes are running; use hardware.scaled.")
        return hardware

    def _limit_bytes(self, hardware: Hardware) -> int:
        """The limit over tensors and what the device reserves; `search` takes the latter off."""
        device = hardware.device
        if self.memory_limit is None:
            return device.memory_bytes
        limit = parse_bytes(self.memory_limit)
        if limit > device.memory_bytes:
            has = f"{device.memory_bytes} bytes ({format_bytes(device.memory_bytes)})"
            raise ValueError(
                f"memory_limit={self.memory_limit!r} is more than {device.name} has: {has}; use at most that, or leave it out."
            )
        return limit


def plain_adamw(device_type: str) -> OptimizerSpec:
    """What `torch.optim.AdamW(model.parameters())` does: foreach kernels on CUDA, one tensor after the other on the CPU."""
    return OptimizerSpec(name="adamw", states=2, step=OptimizerStep.FOR_LOOP if device_type == "cpu" else OptimizerStep.FOREACH)
