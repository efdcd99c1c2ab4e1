"""The site builds, without a network and without a warning."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest

from tests.helpers.distributed import run_ranks

from .pages import ROOT


def built(folder: str) -> tuple[int, str]:
    """Build the site in this process, a fork of one that has imported torch; exit code and warnings."""
    from sphinx.cmd.build import build_main

    os.chdir(ROOT)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = build_main(["-W", "--keep-going", "-n", "-q", "-b", "html", "docs", folder])
    return code, said.getvalue()


@pytest.mark.slow
def test_site_holds_what_is_generated_and_needs_no_script(tmp_path):
    code, said = run_ranks(built, 1, str(tmp_path), init=False, timeout_s=200)[0]
    assert code == 0, said[-4000:]

    def text(name: str) -> str:
        return (tmp_path / f"{name}.html").read_text(encoding="utf-8")

    assert "--memory-limit" in text("cli") and "a100-80" in text("presets") and "SFT, packing" in text("compatibility")
    assert "Args" not in text("api") and "StopSignal" in text("api")
    assert "GLOO_SOCKET_IFNAME" in text("several_machines")
    assert (tmp_path / "_images" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert (page := text("planner")).count("<math") > 60
    assert not [script for script in re.findall(r"<script[^>]*>", page) if "//" in script]
