"""What trains equal to one process: cases by name, each file with those of one kind."""

from __future__ import annotations

from tests.helpers.training import Case

from . import architectures, layouts, modules, optimizers, reads, steps

CASES: dict[str, Case] = {
    name: case
    for kind in (layouts, optimizers, reads, steps, modules, architectures)
    for name, case in kind.CASES.items()
}
