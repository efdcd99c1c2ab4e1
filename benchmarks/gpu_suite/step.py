"""A step of the suite, and its reports while it runs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PARTS = {
    1: "One rank",
    2: "Several ranks on one GPU",
    3: "Offload",
    4: "Memory",
    5: "Time",
    6: "Headline experiments",
}


class Status(str, Enum):
    """Result of a step."""

    DONE = "done"
    MISSED = "missed"
    """The step completed but missed an aim."""
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NEEDS_GPU = "needs a GPU"
    """The step has nothing to test on the CPU, in a rehearsal."""
    NOT_RUN = "not run"
    """The time of the suite was used up."""

    @property
    def is_bad(self) -> bool:
        """Return whether this status makes the suite's exit code 1."""
        return self in (Status.MISSED, Status.FAILED, Status.TIMED_OUT)


@dataclass(slots=True, kw_only=True)
class Bench:
    """Context of a step: its device, time limit, and reports.

    Rows, remarks and missed aims are written immediately, so that a step that fails or is ended keeps its findings.
    """

    device: torch.device
    rehearses: bool
    """Whether the step runs in small sizes, whose times are not judged."""
    folder: Path
    """Folder for the step's files; it is deleted afterwards."""
    out: Path
    """Folder for files to keep, next to the results."""
    found: Path
    """File of findings, one JSON object per line."""
    limit_s: float
    began: float = field(default_factory=time.monotonic)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def compiles(self) -> bool:
        """Return whether blocks can be compiled; says so if not."""
        if self.on_cpu or find_spec("triton"):
            return True
        self.note("There is no triton here: compiled blocks are left out.")
        return False

    @property
    def left_s(self) -> float:
        """Return the seconds until the step is ended."""
        return self.limit_s - (time.monotonic() - self.began)

    def row(self, **cells: Any) -> None:
        """Add a row to the step's table; every row has the same columns, with `_` for blanks in their names."""
        self._write({"row": {name.replace("_", " "): str(cell) for name, cell in cells.items()}})

    def note(self, text: str) -> None:
        """Add a remark below the table."""
        self._write({"note": text})

    def miss(self, text: str) -> None:
        """Report a missed aim; the step continues."""
        self._write({"miss": text})

    def aim(self, met: bool, text: str) -> None:
        """Report a missed aim unless `met`."""
        if not met:
            self.miss(text)

    def _write(self, finding: dict[str, Any]) -> None:
        """Write a finding, without the name of the host."""
        text = json.dumps(finding).replace(f" on {socket.gethostname()} ", " on this host ")
        print(text, flush=True)
        with self.found.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A function that runs in a separate process."""

    name: str
    part: int
    run: Callable[[Bench], None]
    proves: str
    """What the step proves, in one line for the page."""
    expected_s: float
    """Expected seconds on a GPU; the step does not start if less time is left."""
    limit_s: float
    rehearsal_s: float | None
    """Expected seconds on two idle CPU cores; None if there is nothing to rehearse."""

    def expected(self, *, rehearses: bool) -> float:
        """Return the expected seconds."""
        return (self.rehearsal_s or 0.0) if rehearses else self.expected_s

    def limit(self, *, rehearses: bool) -> float:
        """Return the seconds after which the step is ended; more in a rehearsal, whose cores may be shared."""
        return 30.0 + 6 * (self.rehearsal_s or 0.0) if rehearses else self.limit_s


STEPS: dict[str, Step] = {}
"""All steps by name, the most informative first; `catalogue` fills it."""


def step(
    *, part: int, proves: str, expected_s: float, limit_s: float, rehearsal_s: float | None, name: str | None = None
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register the decorated function as a step, under its own name unless another is given."""

    def enter(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        made = Step(
            name=name or run.__name__.replace("_", "-"), part=part, run=run, proves=proves, expected_s=expected_s,
            limit_s=limit_s,
            rehearsal_s=rehearsal_s,
        )  # fmt: skip
        if made.name in STEPS:
            raise ValueError(f"There are two steps {made.name!r}; rename one.")
        STEPS[made.name] = made
        return run

    return enter
