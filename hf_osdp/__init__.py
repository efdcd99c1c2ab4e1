"""Optimal sharded data parallelism for Hugging Face models on PyTorch FSDP2.

Public names are loaded on first use, so that `import hf_osdp` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from .checkpoint.resume import checkpoint_to_resume, last_checkpoint
    from .distributed.stop import StopSignal
    from .integrations.accelerator import OSDPAccelerator
    from .integrations.plain_loop import OptimalShardedDataParallel
    from .integrations.plugin import OSDPPlugin
    from .integrations.trainer import Trainer, with_osdp
    from .measurement.block_times import TimedModel
    from .measurement.machine import measure_hardware, measure_profile
    from .planner.description import ModelDescription
    from .planner.hardware import Hardware
    from .planner.plan import Plan
    from .planner.presets import preset
    from .planner.problem import PlanningProblem
    from .planner.profile import Profile
    from .planner.search.search import search
    from .planner.training_job import TrainingJob
    from .preparation.config import OSDPConfig
    from .sharding.between_steps import full_parameters
    from .sharding.gradients import OSDPGradScaler
    from .tracing.describe import describe

__version__ = "0.1.0"
_MODULES = {
    "checkpoint_to_resume": "checkpoint.resume",
    "describe": "tracing.describe",
    "full_parameters": "sharding.between_steps",
    "Hardware": "planner.hardware",
    "last_checkpoint": "checkpoint.resume",
    "measure_hardware": "measurement.machine",
    "measure_profile": "measurement.machine",
    "ModelDescription": "planner.description",
    "OptimalShardedDataParallel": "integrations.plain_loop",
    "OSDPAccelerator": "integrations.accelerator",
    "OSDPConfig": "preparation.config",
    "OSDPGradScaler": "sharding.gradients",
    "OSDPPlugin": "integrations.plugin",
    "Plan": "planner.plan",
    "PlanningProblem": "planner.problem",
    "preset": "planner.presets",
    "Profile": "planner.profile",
    "search": "planner.search.search",
    "StopSignal": "distributed.stop",
    "TimedModel": "measurement.block_times",
    "Trainer": "integrations.trainer",
    "TrainingJob": "planner.training_job",
    "with_osdp": "integrations.trainer",
}
"""The module of each name that is loaded on first use."""
__all__ = [*sorted(_MODULES), *(name for name in dir() if name.endswith("Error")), "__version__"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
