"""What a check found, and how bad it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ...errors import PreflightError


class Check(str, Enum):
    """What is looked at before the start; the values are what a person reads."""

    MODEL = "model"
    BLOCKS = "blocks"
    TIES = "tied weights"
    MASTERS = "float32 masters"
    FP16 = "fp16 or bf16"
    FROZEN = "frozen parameters"
    OPTIMIZER = "optimizer"
    BATCH = "batch"
    DEVICES = "devices"
    LIMIT = "memory limit"
    PLAN = "plan"
    LINKS = "links"
    PROCESSES = "device memory"
    FOLDER = "output folder"


class Severity(str, Enum):
    """How bad it is; errors stop a run."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line about one thing."""

    check: Check
    severity: Severity
    message: str
    """Value, limit and remedy, in one line."""

    @property
    def line(self) -> str:
        """`warning: ...`."""
        return f"{self.severity.value}: {self.message}"


def note(check: Check, message: str) -> Finding:
    """A finding that a user may want to know."""
    return Finding(check=check, severity=Severity.NOTE, message=message)


def warning(check: Check, message: str) -> Finding:
    """A finding that a user should act on."""
    return Finding(check=check, severity=Severity.WARNING, message=message)


def error(check: Check, message: str) -> Finding:
    """A finding that stops a run."""
    return Finding(check=check, severity=Severity.ERROR, message=message)


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Stop where there is an error.

    Raises:
        PreflightError: one line that has all of them.
    """
    if errors := [finding.message for finding in findings if finding.severity is Severity.ERROR]:
        raise PreflightError(" ".join(errors))
