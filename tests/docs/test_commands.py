"""Planning commands of the pages run, with a small model for the page's."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from hf_osdp.cli.app import app

from .test_pages import FENCE, TEXTS, text

PLANNING = re.compile(r"hf-osdp (plan|explain|compare|what-if|doctor) ")
BLOCKS = [
    [line.strip() for line in re.sub(r"\\\n\s*", " ", block["code"]).splitlines() if PLANNING.match(line.strip())]
    for name in TEXTS
    for block in FENCE.finditer(text(name))
    if block["language"] == "bash"
]
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
SHAPE = {"model_type": "llama", **HEADS, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 8192}


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block], ids=lambda block: block[-1][:50])
def test_planning_commands_run(block, tmp_path, monkeypatch):
    pytest.importorskip("altair")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    for command in block:
        _, name, model, *options = shlex.split(command)
        done = CliRunner().invoke(app, [name, model if model.endswith("plan.json") else "config.json", *options])
        assert done.exit_code == 0, f"{command}\n{done.output}"
