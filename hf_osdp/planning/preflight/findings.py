"""What a preflight check found, and how severe it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ...errors import PreflightError


class Check(str, Enum):
    """A preflight check; its value is shown to the user."""

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
    """Errors stop a run."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of one check."""

    check: Check
    severity: Severity
    message: str
    """Value, limit and remedy, in one line."""

    @property
    def line(self) -> str:
        """Severity and message, such as `warning: ...`."""
        return f"{self.severity.value}: {self.message}"


def note(check: Check, message: str) -> Finding:
    """Return a finding that a user may want to know."""
    return Finding(check=check, severity=Severity.NOTE, message=message)


def warning(check: Check, message: str) -> Finding:
    """Return a finding that a user should act on."""
    return Finding(check=check, severity=Severity.WARNING, message=message)


def error(check: Check, message: str) -> Finding:
    """Return a finding that stops a run."""
    return Finding(check=check, severity=Severity.ERROR, message=message)


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raise a PreflightError that has all errors in one line, if there are any."""
    if errors := [finding.message for finding in findings if finding.severity is Severity.ERROR]:
        raise PreflightError(" ".join(errors))
