"""The checks before the start of a plain loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from ..planner.description import UnitDescription
from ..planner.plan import Plan
from ..sharding.environment import training_device
from .preflight.findings import Severity
from .preflight.ranks import agreed, bf16_on, device_memory
from .preflight.run import Known, findings_of
from .wanted import Found, Wanted, plain_adamw

_log = logging.getLogger(__name__)


def say_what_is_found(model: nn.Module, plan: Plan, units: Sequence[UnitDescription], wanted: Wanted, found: Found | None) -> None:
    """Log on rank 0 what all ranks find to be said of the run. Collective.

    Args:
        model: not yet sharded.
        plan: what is to run.
        units: the model's, split as the plan says.
        wanted: the arguments.
        found: what the plan was found for; None where it was given.

    Raises:
        PreflightError: the run would fail, or train something else than was meant; the same line on every rank.
    """
    device_type = training_device().type
    hardware = None if found is None else found.hardware
    report = None if found is None or found.problem is None else found.problem.result(plan)
    classes = tuple(dict.fromkeys(unit.class_name for unit in units))
    known = Known(
        units=units,
        precision=wanted.precision,
        optimizer=wanted.optimizer or plain_adamw(device_type),
        asked_classes=None if plan.split.operators else wanted.block_classes,
        found_classes=classes,
        plan=plan,
        chosen=found is not None and wanted.strategy in (None, "osdp"),
        hardware=hardware,
        bf16_on=bf16_on(None if hardware is None else hardware.device, device_type),
        time=None if report is None else report.time,
        needed_bytes=None if hardware is None else plan.peak_bytes - hardware.outside_bytes(plan.communicators),
        memory=device_memory(device_type, model),
    )
    findings = agreed(findings_of(known))
    if dist.is_initialized() and dist.get_rank():
        return
    for finding in findings:
        _log.log(logging.INFO if finding.severity is Severity.NOTE else logging.WARNING, "%s", finding.message)
