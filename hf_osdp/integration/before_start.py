"""The checks before the start of a run that Accelerate or the Trainer will make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..planner.evaluate import estimate_plan
from ..preflight.findings import Finding
from ..preflight.ranks import agreed, bf16_on, device_memory
from ..preflight.run import Known, findings_of
from .config import OSDPConfig

if TYPE_CHECKING:
    from .planning import PlannedRun, RunFacts


def checked(run: PlannedRun, model: nn.Module, config: OSDPConfig, facts: RunFacts) -> tuple[Finding, ...]:
    """What all ranks find to be said of a run. Collective.

    Args:
        run: what was planned.
        model: not yet sharded.
        config: what the user asked for.
        facts: what the caller knows about the run.

    Raises:
        PreflightError: it would fail, or train something else than was meant; the same line on every rank.
    """
    device = None if run.hardware is None else run.hardware.device
    if device is None:
        needed = estimate_plan(run.plan, run.description, run.job).memory.peak_bytes
    else:
        needed = run.plan.peak_bytes - device.reserved_bytes
    known = Known(
        units=run.description.units,
        precision=facts.precision,
        optimizer=facts.optimizer,
        asked_classes=config.block_classes,
        found_classes=run.description.block_classes,
        frozen_in_optimizer=facts.frozen_in_optimizer,
        plan=run.plan,
        chosen=config.plan is None and config.strategy == "osdp",
        hardware=run.hardware,
        bf16_on=bf16_on(device, facts.device_type),
        time=None if run.search is None else run.search.time,
        others=run.comparison or (),
        needed_bytes=needed,
        memory=device_memory(facts.device_type, model),
        folder=facts.folder,
    )
    return agreed(findings_of(known))
