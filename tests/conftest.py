"""Tests that run on ranks (`@pytest.mark.on_ranks(2)`), and what no test keeps for the next."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# As ranks have it: on two cores the threads of two workers would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has its parent's
    # As users have it, a model that was described is not traced again by the next test; machines are measured anew.
    _KEPT = tempfile.TemporaryDirectory(prefix="hf_osdp_tests_")
    (Path(_KEPT.name) / "machines").touch()
    os.environ["OSDP_CACHE"] = _KEPT.name


_ONE_IN, _MOST_CASES, _LONGEST_S = 12, 3, 900


def pytest_addoption(parser: pytest.Parser) -> None:
    said = f"run about one test function of {_ONE_IN}, with at most {_MOST_CASES} cases, drawn by TEXT; for -m slow"
    parser.addoption("--sample", metavar="TEXT", help=said)


@pytest.hookimpl(trylast=True)  # of the tests that other options leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the sample that `--sample` asks for."""
    if (text := config.getoption("--sample")) is None:
        return

    def drawn(name: str) -> float:
        return random.Random(f"{text} {name}").random()

    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (limit := item.get_closest_marker("timeout")) is not None and limit.args[0] > _LONGEST_S:
            continue  # such as the rehearsal of the GPU suite
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    sample = {
        item
        for function, group in cases.items() if drawn(function) * _ONE_IN < 1
        for item in sorted(group, key=lambda item: drawn(item.nodeid))[:_MOST_CASES]
    }  # fmt: skip
    config.hook.pytest_deselected(items=[item for item in items if item not in sample])
    items[:] = [item for item in items if item in sample]


def pytest_collectstart() -> None:
    """Nothing that is imported and collected is to be freed."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections, which would go through all of it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def searches_are_not_kept() -> None:
    """Let each test search for itself: many replace what a search calls."""
    if module := sys.modules.get("hf_osdp.planner.search.search"):
        module._searched.cache_clear()
        _check_proofs(module)


def _check_proofs(module: ModuleType) -> None:
    """Let each plan of few units that a search returns be checked without the search, and that no plan fits."""
    found = module._Search.simple
    if found.func.__name__ == "checked":
        return
    from tests.proof import MOST_UNITS, check, check_none

    def checked(self: Any) -> Any:
        result = found.func(self)
        if len(self._problem.description.units) > MOST_UNITS:
            return result
        if result is None:
            check_none(self._problem)
        else:
            check(result.plan, self._problem)
        return result

    module._Search.simple = functools.cached_property(checked)
    module._Search.simple.__set_name__(module._Search, "simple")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test with the mark `on_ranks` on each rank in place of this process.

    The mark's arguments are those of `run_ranks`; without a number of ranks, the test's argument `world_size` is it.
    With `shared=True` the ranks have run other tests before.
    """
    mark = pyfuncitem.get_closest_marker("on_ranks")
    if mark is None:
        return None
    from tests.helpers.distributed import run_ranks  # torch, which many tests do without

    given = [pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames]
    world_size = mark.args[0] if mark.args else pyfuncitem.funcargs["world_size"]
    run_ranks(pyfuncitem.obj, world_size, *given, **mark.kwargs)
    return True
