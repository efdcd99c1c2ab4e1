"""Errors of the domain. What a user passed wrongly is a `ValueError`; these say what the package found out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OSDPError(Exception):
    """Base of every error that hf_osdp raises about planning and running."""


class DescriptionError(OSDPError):
    """A model could not be described: no block matches, or its forward pass could not be traced."""


class CheckpointingError(DescriptionError):
    """The model's activations cannot be checkpointed."""


class HardwareError(OSDPError):
    """A device, link or topology is unknown or cannot be measured."""


class LaunchError(OSDPError):
    """The launched ranks do not come together: some are missing, were started twice, or run other versions."""


class CheckpointError(OSDPError):
    """A checkpoint is damaged, incomplete, or of another model."""


class ProfileError(OSDPError):
    """A profile cannot be read, or has no times for this model."""


class PreflightError(OSDPError):
    """A run would fail, or train something else than was meant; nothing was sharded or written."""


class InfeasibleError(OSDPError):
    """No plan meets the memory limit.

    Attributes:
        memory_limit_bytes: the limit that was asked for, in bytes.
        least_peak_bytes: the tightest limit that some plan would meet, in bytes, the margin included.
        remedies: changes that would make it fit, the cheapest first, one line each.
    """

    def __init__(self, message: str, *, memory_limit_bytes: int, least_peak_bytes: int, remedies: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.memory_limit_bytes = memory_limit_bytes
        self.least_peak_bytes = least_peak_bytes
        self.remedies = remedies


class PlanError(OSDPError):
    """A plan cannot be read, or does not belong to this model, world size or version."""


class PlanMismatchError(PlanError):
    """Ranks hold different plans, or what runs is not what the plan says."""


class UnreducedGradientError(OSDPError):
    """A unit got a gradient that was not reduced over the ranks, so that they would train different weights."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known names that look most like one that is not known, as an addition to a message; empty where none does."""
    text, names = name.lower(), tuple(known)
    found = dict.fromkeys([*(one for one in names if text in one), *difflib.get_close_matches(text, names, n=3)])
    return f" (nearest: {', '.join([*found][:3])})" if text and found else ""
