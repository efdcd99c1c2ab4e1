"""One step of the suite, and what it reports while it runs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
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
    """What became of a step."""

    DONE = "done"
    MISSED = "missed"
    """It ran to its end; an aim was missed."""
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NEEDS_GPU = "needs a GPU"
    """In a rehearsal, of a step that has nothing to show on the CPU."""
    NOT_RUN = "not run"
    """The minutes were spent."""

    @property
    def is_bad(self) -> bool:
        """Whether the suite's exit code is 1 for it."""
        return self in (Status.MISSED, Status.FAILED, Status.TIMED_OUT)


@dataclass(slots=True, kw_only=True)
class Bench:
    """What a step is given: where it runs, how long it may take, and where it reports to.

    Rows, remarks and missed aims are written as they come, so that a step that fails or is ended keeps what it has found.
    """

    device: torch.device
    rehearses: bool
    """On the CPU, in small sizes."""
    folder: Path
    """For whatever the step writes; it is gone afterwards."""
    out: Path
    """For what is to be kept, beside the results."""
    found: Path
    """File of findings, one JSON object a line."""
    limit_s: float
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the step is ended."""
        return self.limit_s - (time.monotonic() - self.began)

    def row(self, **cells: Any) -> None:
        """One row of the step's table; every row has the same columns, with `_` for blanks in their names."""
        self._write({"row": {name.replace("_", " "): str(cell) for name, cell in cells.items()}})

    def note(self, text: str) -> None:
        """A remark below the table."""
        self._write({"note": text})

    def miss(self, text: str) -> None:
        """An aim that was missed. The step goes on."""
        self._write({"miss": text})

    def aim(self, met: bool, text: str) -> None:
        """A missed aim, unless it is met."""
        if not met:
            self.miss(text)

    def _write(self, finding: dict[str, Any]) -> None:
        """Pages name no hosts."""
        text = json.dumps(finding).replace(f" on {socket.gethostname()} ", " on this host ")
        print(text, flush=True)
        with self.found.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A function, run in a process of its own."""

    name: str
    part: int
    run: Callable[[Bench], None]
    proves: str
    """In one line, for the page."""
    expected_s: float
    """On a GPU; with less left of the suite's minutes it is not begun."""
    limit_s: float
    rehearsal_s: float | None
    """The same on two idle CPU cores; None where there is nothing to rehearse."""

    def expected(self, *, rehearses: bool) -> float:
        """Seconds it takes."""
        return (self.rehearsal_s or 0.0) if rehearses else self.expected_s

    def limit(self, *, rehearses: bool) -> float:
        """Seconds after which it is ended; a rehearsal's cores may be shared."""
        return 30.0 + 6 * (self.rehearsal_s or 0.0) if rehearses else self.limit_s


STEPS: dict[str, Step] = {}
"""All steps by name, in order of worth; `catalogue` fills it."""


def step(
    *, part: int, proves: str, expected_s: float, limit_s: float, rehearsal_s: float | None, name: str | None = None
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Enter the decorated function as a step, under its own name unless another is given."""

    def enter(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        made = Step(
            name=name or run.__name__.replace("_", "-"), part=part, run=run, proves=proves, expected_s=expected_s, limit_s=limit_s,
            rehearsal_s=rehearsal_s,
        )  # fmt: skip
        if made.name in STEPS:
            raise ValueError(f"There are two steps {made.name!r}; rename one.")
        STEPS[made.name] = made
        return run

    return enter
