"""The programs on the pages run, here on forked ranks that do not measure the machine, and slowly as pages say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.distributed import free_port, run_program, run_ranks
from tests.helpers.hardware import take_preset
from tests.helpers.output import ends_of

from .pages import DOCS, page

SNIPPETS = DOCS / "snippets"


def ran(name: str, folder: str, *arguments: str) -> str:
    take_preset()
    os.chdir(folder)
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(SNIPPETS / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def on_two_ranks(name: str, folder: Path, *arguments: str) -> str:
    return run_ranks(ran, 2, name, str(folder), *arguments, init=False, timeout_s=120)[0]


def saved_tensors(folder: Path) -> int:
    return len(load_file(folder / "model.safetensors"))


@pytest.mark.slow
def test_the_trainer(tmp_path):
    printed = on_two_ranks("with_trainer", tmp_path)
    assert re.search(r"transformer\.h\.0.*(shard 2|replicate)", printed) and "Estimated and measured" in printed
    report = json.loads((tmp_path / "runs/with_trainer/osdp_report.json").read_text())
    assert report["plan"]["micro_batch_size"] * report["plan"]["accumulation_steps"] == 8
    assert saved_tensors(tmp_path / "runs/with_trainer") > 20


@pytest.mark.slow
def test_a_loop_goes_on_where_it_was_interrupted(tmp_path):
    assert on_two_ranks("fault_tolerant_loop", tmp_path, "21").endswith("step 21 of 21\n")
    assert "goes on from step 20\nstep 22 of 22" in on_two_ranks("fault_tolerant_loop", tmp_path, "22")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("with_accelerator", "Estimated and measured"), ("plain_loop", "")])
def test_loops_train_and_save(tmp_path, name, said):
    assert said in on_two_ranks(name, tmp_path)
    assert saved_tensors(tmp_path / "runs" / name) > 20


@pytest.mark.slow
def test_the_same_training(tmp_path):
    printed = on_two_ranks("same_training", tmp_path)
    assert float(re.search(r"further off than (\S+)", printed)[1]) < 1e-12


@pytest.mark.slow
def test_the_plan_on_paper_prints_what_the_page_says(tmp_path):
    printed = run_ranks(ran, 1, "plan_on_paper", str(tmp_path), init=False)[0]
    shown = re.search(r"it prints\n\n```text\n(.*?)```", page("quickstart.md"), re.DOTALL)[1]
    assert printed.startswith(shown) and "plan.proven_optimal=" in printed
    assert "No plan fits 2.0 GiB per device" in printed


@pytest.mark.slow
def test_the_cells_of_the_notebook(tmp_path):
    text = (SNIPPETS / "in_notebook.py").read_text(encoding="utf-8")
    program = tmp_path / "cells.py"
    program.write_text(text.replace("num_processes=2", f'num_processes=2, use_port="{free_port()}"'), encoding="utf-8")
    done = run_program([sys.executable, program], cwd=tmp_path)
    assert done.returncode == 0 and "2 processes, loss" in done.stdout, ends_of(done.stderr)
