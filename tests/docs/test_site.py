"""The site builds, without a network and without a warning."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks

from .pages import ROOT, page


def built(folder: str) -> tuple[int, str]:
    """Build the site in this process, which `run_ranks` forked from one that has imported torch; exit code and warnings."""
    from sphinx.cmd.build import build_main

    os.chdir(ROOT)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = build_main(["-W", "--keep-going", "-n", "-q", "-b", "html", "docs", folder])
    return code, said.getvalue()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    code, said = run_ranks(built, 1, str(folder), init=False, timeout_s=200)[0]
    assert code == 0, said[-4000:]
    return folder


def test_the_command_that_is_documented_is_the_one_that_builds():
    command = "python -m sphinx -W -b html docs docs/_build/html"
    assert command in page("index.md") and command in (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    assert "docs/_build" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_pages_hold_what_they_take_from_elsewhere(site):
    def text(name: str) -> str:
        return re.sub(r"<[^>]+>", "", (site / f"{name}.html").read_text(encoding="utf-8"))

    assert "OSDPConfig(memory_limit=" in text("integration") and "fsdp_sharding_strategy:" in text("integration")
    assert "GLOO_SOCKET_IFNAME" in text("several_machines") and "run_clm.py" in text("recipes")
    assert "Args" not in text("api") and "Parameters" in text("api") and "StopSignal" in text("api")


def test_formulas_need_no_script(site):
    planner = (site / "planner.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script[^>]*>", planner)
    assert planner.count("<math") > 60 and "$$" not in planner and not [script for script in scripts if "//" in script]


def test_the_picture_is_there(site):
    assert (site / "_images" / "plan.png").read_bytes()[:4] == b"\x89PNG"
