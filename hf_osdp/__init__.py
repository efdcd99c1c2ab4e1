"""Optimal sharded data parallelism for Hugging Face models on PyTorch FSDP2.

Public names are loaded when first used, so that `import hf_osdp` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "CheckpointError": "errors",
    "DescriptionError": "errors",
    "HardwareError": "errors",
    "InfeasibleError": "errors",
    "LaunchError": "errors",
    "OSDPError": "errors",
    "PlanError": "errors",
    "PlanMismatchError": "errors",
    "PreflightError": "errors",
    "ProfileError": "errors",
    "UnreducedGradientError": "errors",
    "Hardware": "planner.hardware",
    "ModelDescription": "planner.description",
    "Plan": "planner.plan",
    "Profile": "planner.profile",
    "PlanningProblem": "planner.problem",
    "TrainingJob": "planner.job",
    "preset": "planner.presets",
    "search": "planner.search.search",
    "checkpoint_to_resume": "checkpoint.resume",
    "last_checkpoint": "checkpoint.resume",
    "describe": "tracing.describe",
    "measure_hardware": "measurement.machine",
    "measure_profile": "measurement.machine",
    "TimedModel": "measurement.block_times",
    "OptimalShardedDataParallel": "integrations.plain_loop",
    "OSDPGradScaler": "sharding.scaler",
    "StopSignal": "distributed.stop",
    "OSDPAccelerator": "integrations.accelerator",
    "OSDPConfig": "planning.config",
    "OSDPPlugin": "integrations.plugin",
    "Trainer": "integrations.trainer",
    "with_osdp": "integrations.trainer",
}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from .checkpoint.resume import checkpoint_to_resume, last_checkpoint
    from .distributed.stop import StopSignal
    from .errors import (
        CheckpointError,
        DescriptionError,
        HardwareError,
        InfeasibleError,
        LaunchError,
        OSDPError,
        PlanError,
        PlanMismatchError,
        PreflightError,
        ProfileError,
        UnreducedGradientError,
    )
    from .integrations.accelerator import OSDPAccelerator
    from .integrations.plain_loop import OptimalShardedDataParallel
    from .integrations.plugin import OSDPPlugin
    from .integrations.trainer import Trainer, with_osdp
    from .measurement.block_times import TimedModel
    from .measurement.machine import measure_hardware, measure_profile
    from .planner.description import ModelDescription
    from .planner.hardware import Hardware
    from .planner.job import TrainingJob
    from .planner.plan import Plan
    from .planner.presets import preset
    from .planner.problem import PlanningProblem
    from .planner.profile import Profile
    from .planner.search.search import search
    from .planning.config import OSDPConfig
    from .sharding.scaler import OSDPGradScaler
    from .tracing.describe import describe
