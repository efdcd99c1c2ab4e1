"""`hf-osdp profile`: what it writes and shows, and what it refuses in one line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from hf_osdp.planner.profile import Profile
from tests.helpers.distributed import run_ranks

CONFIG = {
    "model_type": "gpt2", "n_layer": 4, "n_embd": 20, "n_head": 4, "vocab_size": 61, "n_positions": 16, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def run(*arguments: object):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def test_a_model_is_profiled_and_the_file_can_be_read(model, tmp_path):
    out = tmp_path / "p.json"
    done = run(
        model, "--sequence-length", 12, "--micro-batch-sizes", "1,2", "--precision", "bf16", "--device", "cpu", "--seconds", 0.2,
        "--output", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    profile = Profile.load(out)
    assert profile.micro_batch_sizes == (1, 2)
    assert {s.compute_dtype.value for s in profile.segments} == {"bfloat16"}
    assert "GPT2Block" in done.output and str(out.name) in done.output
    assert max(map(len, done.output.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "/no/such/p.json"], "there is no folder '/no/such'"),
        (["--output", "p.json", "--precision", "bf16"], "--precision is about MODEL's blocks, but there is no MODEL"),
        (["MODEL", "--output", "p.json"], "give --sequence-length"),
        (["MODEL", "--output", "p.json", "--sequence-length", "12", "--micro-batch-sizes", "0"], "whole numbers of at least 1"),
        (["MODEL", "--output", "p.json", "--sequence-length", "99"], "sequence_length=99 is more than the 16 positions"),
        (["nothing.json", "--output", "p.json", "--sequence-length", "12"], "there is no such file"),
    ],
)
def test_wrong_requests_are_one_line(model, arguments, message):
    done = run(*(model if argument == "MODEL" else argument for argument in arguments), "--device", "cpu", "--seconds", 0.1)
    assert done.exit_code == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def _profile_here(output: str) -> str:
    done = run("--device", "cpu", "--seconds", 0.2, "--output", output)
    assert done.exit_code == 0, done.output
    return done.output


def test_under_a_launcher_rank_zero_shows_and_writes(tmp_path):
    out = tmp_path / "p.json"
    first, second = run_ranks(_profile_here, 2, str(out), init=False)
    assert "all-gather" in first and "FSDP2's own work" in first
    assert second == ""
    assert Profile.load(out).hardware.world_size == 2
