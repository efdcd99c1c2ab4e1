"""The checks before the start of a run that Accelerate or the Trainer will make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..planner.cost.evaluate import estimate_plan
from .config import OSDPConfig
from .preflight.findings import Finding
from .preflight.folder import RunFolder
from .preflight.ranks import agreed, bf16_on, device_memory
from .preflight.run import Known, findings_of

if TYPE_CHECKING:
    from .plan_run import PlannedRun, RunFacts


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
    if run.hardware is None:
        needed = estimate_plan(run.plan, run.description, run.job).memory.peak_bytes
    else:
        needed = run.plan.peak_bytes - run.hardware.outside_bytes(run.plan.communicators)
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


def trainer_folder(args: TrainingArguments, model: Any) -> RunFolder:
    """Where the Trainer writes, and what.

    Args:
        args: its arguments.
        model: what it trains; of peft's, adapters alone are saved.
    """
    return RunFolder(
        path=args.output_dir,
        saves=args.save_strategy != SaveStrategy.NO,
        limit=args.save_total_limit,
        states=not args.save_only_model,
        adapters=getattr(model, "peft_config", None) is not None,
    )


def project_folder(project: ProjectConfiguration) -> RunFolder | None:
    """Where an Accelerate loop writes; None where it has not said. How many checkpoints there will be is known where Accelerate names
    them.

    Args:
        project: the accelerator's configuration.
    """
    if project.project_dir is None:
        return None
    if not project.automatic_checkpoint_naming:
        return RunFolder(path=project.project_dir, saves=False)
    return RunFolder(path=Path(project.project_dir) / "checkpoints", limit=project.total_limit)


def frozen_given(optimizer: Any) -> int:
    """How many frozen parameters an optimizer was given; 0 where there is none yet."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    return sum(not parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])
