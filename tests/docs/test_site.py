"""The site builds, without a network and without a warning."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks

from .pages import ROOT


def built(folder: str) -> tuple[int, str]:
    """Build the site in this process, which `run_ranks` forked from one that has imported torch; exit code and
    warnings.
    """
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
    assert command in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8") and command in (
        ROOT / "docs" / "conf.py"
    ).read_text(encoding="utf-8")
    assert "docs/_build" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_pages_hold_what_they_take_from_elsewhere(site):
    def text(name: str) -> str:
        return re.sub(r"<[^>]+>", "", (site / f"{name}.html").read_text(encoding="utf-8"))

    assert "OSDPConfig(memory_limit=" in text("trainer") and "fsdp_sharding_strategy:" in text("accelerate")
    assert "GLOO_SOCKET_IFNAME" in text("several_machines") and "run_clm.py" in text("recipes")
    assert "Args" not in text("api") and "Parameters" in text("api") and "StopSignal" in text("api")


def test_formulas_need_no_script(site):
    pages = [(site / f"{name}.html").read_text(encoding="utf-8") for name in ("planner", "planner_search")]
    scripts = [script for page in pages for script in re.findall(r"<script[^>]*>", page)]
    assert sum(page.count("<math") for page in pages) > 60 and not [page for page in pages if "$$" in page]
    assert not [script for script in scripts if "//" in script]


def test_the_program_says_its_own_options_and_presets(site):
    commands, presets = ((site / f"{name}.html").read_text(encoding="utf-8") for name in ("cli", "presets"))
    assert all(
        f"hf-osdp {name}</h2>" in re.sub(r"<a class=\"headerlink.*?</a>", "", commands)
        for name in ("plan", "explain", "convert")
    )
    assert "--memory-limit" in commands and "a100-80" in presets and "data sheet" in presets


def test_long_tables_come_from_their_files(site):
    assert "SFT, packing" in (site / "compatibility.html").read_text(encoding="utf-8")
    assert any((site / "_downloads").rglob("memory_error_layouts.csv"))


def test_the_pictures_are_there(site):
    for name in ("plan", "limits"):
        assert (site / "_images" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
