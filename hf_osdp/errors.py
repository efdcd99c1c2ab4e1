"""Errors of the domain.

A wrong argument raises `ValueError`; these errors report problems that the package found itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from enum import IntEnum

_SHOWN = 80
"""Characters of a value in a message."""


class OSDPError(Exception):
    """Base of every error that hf_osdp raises about planning and running."""


class DescriptionError(OSDPError):
    """A model could not be described: no block matches, or its forward pass could not be traced."""


class DescriptionTimeoutError(DescriptionError):
    """Describing the model takes too long."""


class CheckpointingError(DescriptionError):
    """The model's activations cannot be checkpointed."""


class HardwareError(OSDPError):
    """A device, link or topology is unknown or cannot be measured."""


class LaunchError(OSDPError):
    """The launched ranks cannot form a process group."""


class CheckpointError(OSDPError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class ProfileError(OSDPError):
    """A profile cannot be read, or has no times for this model."""


class PreflightError(OSDPError):
    """A run would fail or train something that the user did not intend; nothing was sharded or written."""


class Price(IntEnum):
    """What a remedy costs the user, in the order in which remedies are shown."""

    SETTING, SIZE, DEVICES, MEMORY = range(4)


class Remedy(str):
    """A change that makes the model fit, in the words of a script; `flags` are those of the command line."""

    flags: str
    price: Price

    def __new__(cls, script: str, flags: str | None = None, price: Price = Price.SETTING) -> Remedy:
        made = super().__new__(cls, script)
        made.flags, made.price = script if flags is None else flags, price
        return made


class InfeasibleError(OSDPError):
    """No plan meets the memory limit.

    Attributes:
        finding: the message without the remedies.
        memory_limit_bytes: the requested limit, in bytes.
        least_peak_bytes: the lowest limit that some plan would meet, in bytes, including the margin.
        remedies: changes that would make the model fit, by `Price`: settings, sizes, devices, more memory.
    """

    def __init__(
        self, finding: str, *, memory_limit_bytes: int, least_peak_bytes: int, remedies: tuple[Remedy, ...] = ()
    ) -> None:
        remedies = tuple(sorted(remedies, key=lambda remedy: remedy.price))
        super().__init__(f"{finding} Use {'; or '.join(remedies)}." if remedies else finding)
        self.finding = finding
        self.memory_limit_bytes = memory_limit_bytes
        self.least_peak_bytes = least_peak_bytes
        self.remedies = remedies

    @property
    def on_command_line(self) -> str:
        """The message with the remedies as flags."""
        return (
            f"{self.finding} Use {'; or '.join(way.flags for way in self.remedies)}." if self.remedies else str(self)
        )

    def with_remedies(self, more: tuple[Remedy, ...]) -> InfeasibleError:
        """Return the error with further remedies."""
        return InfeasibleError(
            self.finding, memory_limit_bytes=self.memory_limit_bytes, least_peak_bytes=self.least_peak_bytes,
            remedies=self.remedies + more,
        )  # fmt: skip


class PlanError(OSDPError):
    """A plan cannot be read, or does not belong to this model, world size or version."""


class PlanMismatchError(PlanError):
    """Ranks hold different plans, or the sharded model differs from the plan."""


class UnreducedGradientError(OSDPError):
    """A unit has a gradient that was not reduced over the ranks, so that the ranks would train different weights."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known names most similar to an unknown name, as an addition to a message; empty if none is
    similar.
    """
    text, names = name.lower(), tuple(known)
    found = dict.fromkeys([*(one for one in names if text in one), *difflib.get_close_matches(text, names, n=3)])
    return f" (nearest: {', '.join([*found][:3])})" if text and found else ""


def refuse_first(refused: Mapping[str, object], kind: type[Exception] = ValueError) -> None:
    """Raise the first message whose condition holds."""
    for message, holds in refused.items():
        if holds:
            raise kind(message)


def one_line(text: object) -> str:
    """Return a text, or an error's message, in one line."""
    return " ".join(str(text).split())


def shown(value: object) -> str:
    """Return a value as Python prints it, in one line of at most 80 characters."""
    text = one_line(repr(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]]).rstrip(".: ")
