"""`hf-osdp doctor`: a table in which every check stands, and what it finds."""

from __future__ import annotations

import json

import pytest
from transformers import GPT2Config
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from hf_osdp.preparation.preflight import Check

SIZES = ("--sequence-length", "32", "--global-batch-size", "32")
DEVICES = ("--device", "cpu", "--devices-per-node", "4")
Rows = dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 500, "n_positions": 64}
    GPT2Config(**sizes, dtype="bfloat16").save_pretrained(folder)
    return str(folder)


def call(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def rows(*arguments, code: int = 0) -> Rows:
    done = call(*arguments, "--json", "-")
    assert (done.exit_code, done.stderr) == (code, ""), done.output
    found: Rows = {}
    for row in json.loads(done.stdout)["checks"]:
        found.setdefault(row["check"], []).append((row["result"], row["text"]))
    return found


def test_doctor_makes_every_check_of_a_sound_run(model, tmp_path):
    files = ("--output-dir", tmp_path / "out", "--json", tmp_path / "x.json")
    done = call(model, *SIZES, *DEVICES, "--precision", "bf16", *files)
    assert done.exit_code == 0, done.output
    assert "…" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 100
    content = json.loads((tmp_path / "x.json").read_text())
    results = {row["check"]: row["result"] for row in content["checks"]}
    assert content["errors"] == 0 and set(results) == {check.value for check in Check} | {"this machine", "ranks"}
    assert {name for name, result in results.items() if result != "ok"} == {"ranks"}
    assert "parameters are float32" in done.stdout  # the masters that a run holds, of a configuration in bfloat16
    assert not (tmp_path / "out").exists()


def test_doctor_reports_all_errors_at_once(model, tmp_path):
    (tmp_path / "file").write_text("")
    wrong = "--optimizer Lomo --memory-limit 25GiB --lora-targets x --sequence-length 65 --global-batch-size 33"
    found = rows(model, *DEVICES, *wrong.split(), "--output-dir", tmp_path / "file", code=1)
    for name, part in {
        "optimizer": "lomo", "memory limit": "--memory-limit 25GiB is more", "batch": "global_batch_size=33 does",
        "model": "--lora-targets x has no effect",
    }.items():  # fmt: skip
        assert found[name][0][0] == "error" and part in found[name][0][1]
    assert found["the rest"][0][0] == "not done"


@pytest.mark.slow
def test_doctor_exits_with_code_0_for_warnings_alone(model, monkeypatch):
    flags = "--device cpu --num-nodes 2 --devices-per-node 2 --strategy fsdp --block-classes GPT2Model,LlamaLayer"
    found = rows(model, *SIZES, *flags.split(), "--activation-checkpointing")
    assert [result for result, _ in found["blocks"]] == ["warning", "note"]
    assert "trainable parameters are in bfloat16" in found["float32 masters"][0][1]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    (found,) = rows(model, *SIZES, "--device", "h100", "--devices-per-node", 4)["allocator"]
    assert found[0] == "warning" and "segments that do not expand" in found[1]
