"""`hf-osdp profile`: what it writes and shows, and what it refuses in one line."""

from __future__ import annotations

import pytest
from transformers import GPT2Config
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from hf_osdp.planner.profile import Profile
from tests.helpers.distributed import run_ranks


@pytest.fixture
def model(tmp_path) -> str:
    GPT2Config(n_layer=4, n_embd=20, n_head=4, vocab_size=61, n_positions=16).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def run(*arguments: object):
    return CliRunner().invoke(app, ["profile", "--device", "cpu", "--seconds", "0.1", *map(str, arguments)])


def test_profile_times_a_model_and_writes_a_readable_file(model, tmp_path):
    out = tmp_path / "p.json"
    done = run(model, "--sequence-length", 12, "--micro-batch-sizes", "1,2", "--precision", "bf16", "--output", out)
    assert done.exit_code == 0, done.output
    profile = Profile.load(out)
    assert profile.micro_batch_sizes == (1, 2)
    assert {s.compute_dtype.value for s in profile.segments} == {"bfloat16"}
    assert "GPT2Block" in done.output and str(out.name) in done.output
    assert max(map(len, done.output.splitlines())) <= 100


def _profile_here(output: str) -> str:
    return run("--output", output).output


@pytest.mark.slow
def test_profile_under_a_launcher_comes_from_rank_zero(tmp_path):
    out = tmp_path / "p.json"
    first, second = run_ranks(_profile_here, 2, str(out), init=False)
    assert "all-gather" in first and "FSDP2's own work" in first
    assert second == ""
    assert Profile.load(out).hardware.world_size == 2
