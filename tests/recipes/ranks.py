"""Recipes one after the other in one group of gloo ranks, where torch and transformers are imported already."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from tests.helpers.distributed import run_ranks
from tests.helpers.hardware import take_preset

RECIPES = Path(__file__).parents[2] / "recipes"
Run = tuple[str, list[str]]
"""A script's name, and its command line."""


def run_together(folder: Path, runs: list[Run], *, processes: int = 2, nodes: int = 1) -> list[str]:
    """Run each to its end, with caches in `folder`: what rank 0 printed in each."""
    caches = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules")}
    return run_ranks(run_each, processes, runs, nodes=nodes, env=caches, timeout_s=200.0)[0]


def run_each(runs: list[Run]) -> list[str]:
    sys.path.insert(0, str(RECIPES))
    import accelerate
    import datasets
    from accelerate.state import AcceleratorState

    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):  # read when datasets was imported, before the fork
        setattr(datasets.config, name, Path(os.environ[name]))
    take_preset()
    accelerate.Accelerator.end_training = lambda self: None  # it would end the process group
    environment, printed = dict(os.environ), []
    for number, (script, argv) in enumerate(runs):
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(environment)  # precision travels in it
        sys.argv = argv
        output = Path(os.environ["HF_DATASETS_CACHE"]).parent / f"rank{os.environ['RANK']}-{number}.out"
        with output.open("w") as file, redirect_stdout(file):
            importlib.import_module(script).main()
        printed.append(output.read_text())
    return printed
