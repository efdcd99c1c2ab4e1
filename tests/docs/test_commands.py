"""Every command of every page is run: here with a small model, by the test that is named, or elsewhere for the
reason that is given.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from hf_osdp.cli.app import app

from .test_pages import FENCE, TEXTS, names_in, text

BLOCKS = [
    [
        line.strip()
        for line in re.sub(r"\\\n\s*", " ", block["code"]).splitlines()
        if line.strip() and not line.startswith("#")
    ]
    for name in TEXTS
    for block in FENCE.finditer(text(name))
    if block["language"] == "bash"
]
PLANNING = re.compile(r"hf-osdp (plan|explain|compare|what-if|doctor) ")
SHAPE = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128,
         "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 300, "max_position_embeddings": 8192}  # fmt: skip
RUN_BY = {
    r"hf-osdp app$|playwright screenshot ": "tests/unit/cli/test_browser.py::test_page_answers_three_questions",
    r"hf-osdp convert ": "tests/unit/checkpoint/test_convert.py::test_command_writes_what_from_pretrained_reads",
    r".* -m hf_osdp profile ": "tests/unit/cli/test_profile_command.py::test_profile_under_a_launcher_is_shown_and_written_by_rank_zero",  # noqa: E501
    r".* -m hf_osdp\.run ": "tests/distributed/test_run.py::test_launchers_start_it",
    r".*recipes/run_clm\.py recipes/gpt2/demo\.yaml$": "tests/recipes/test_run_clm.py::test_two_processes_train_and_save",  # noqa: E501
    r"cpu recipes/run_\w+\.py recipes/": "tests/recipes/test_files_of_arguments.py::test_each_file_trains_a_tiny_model",  # noqa: E501
    r"torchrun .* docs/snippets/|torchrun --nproc-per-node 2 train\.py$": "tests/docs/test_snippets.py::test_as_the_page_says",  # noqa: E501
    r".*recipes/run_mlm\.py recipes/bert_large/": "tests/recipes/test_run_mlm.py::test_the_recipe_for_two_machines_is_bert_large",  # noqa: E501
    r"python -m benchmarks\.compatibility ": "tests/compatibility/test_rows.py::test_row_is_as_expected",
    r"(FAKE_CUDA_\w+=\d+ )?python -m benchmarks\.gpu_suite .*": "tests/unit/benchmarks/test_gpu_suite.py::test_the_whole_rehearsal_ends_well",  # noqa: E501
    r"python benchmarks/limits\.py ": "tests/unit/benchmarks/test_limits.py::test_figures_of_an_earlier_run_are_drawn",
    r"python benchmarks/two_machines/": "tests/distributed/test_two_machines_emulated.py::test_bytes_over_the_link_are_those_of_theory",  # noqa: E501
    r".*two_machines\.yaml .* train\.py|torchrun --nnodes 2 .* train\.py": "tests/distributed/test_launches.py::test_torchrun_trains",  # noqa: E501
    r"#SBATCH --(n|g|t)|#!/bin/bash|export |srun --kill": "tests/distributed/test_launches.py::test_the_batch_file_trains",  # noqa: E501
    r"python -m sphinx ": "tests/docs/test_site.py::test_the_command_that_is_documented_is_the_one_that_builds",
}
"""The beginning of a command → the test that runs it, or what it stands for with less work."""
ELSEWHERE = {
    r"python3 -m venv |pip install |ruff |python -m pytest |.*\.venv-cuda": "the script of CI does it; a test cannot install or start all tests",  # noqa: E501
    r"#SBATCH --(requeue|signal)|srun torchrun ": "needs SLURM, which starts a job again",
    r"cosmic-ray |cr-|nice .*cosmic-ray |python -m tests\.mutation": "takes hours; docs/mutation.md has the results",
    r"python -m coverage ": "runs the tests themselves",
    r"python benchmarks/prefetch_depth\.py": "searches for minutes; the page has its figures",
    r"python -m benchmarks\.simplicity limits": "searches for minutes; the page has its figures",
    r"python benchmarks/published\.py ": "traces 92 models for minutes; the page has its figures",
    r"[cg]pu\(\) |python -c ": "defines what the next lines use",
}
"""The beginning of a command → why no test runs it."""


def places(command: str) -> list[str]:
    return [place for place in (*RUN_BY, *ELSEWHERE) if re.match(place, command)] + [PLANNING.pattern] * bool(
        PLANNING.match(command)
    )


def test_every_command_is_run_or_has_a_reason():
    commands = [command for block in BLOCKS for command in block]
    assert len(commands) > 60 and not [command for command in commands if not places(command)]
    assert {*RUN_BY, *ELSEWHERE, PLANNING.pattern} == {place for command in commands for place in places(command)}


@pytest.mark.parametrize("test", RUN_BY.values())
def test_the_tests_that_run_commands_are_there(test):
    path, _, name = test.partition("::")
    assert name in names_in(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if any(map(PLANNING.match, block))], ids=lambda block: block[-1][:50]
)
def test_planning_commands_run(block, tmp_path, monkeypatch):
    """With the options of the page, in its order and in one folder; a small model stands in for the page's."""
    pytest.importorskip("altair")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    for command in filter(PLANNING.match, block):
        _, name, model, *options = shlex.split(command)
        done = CliRunner().invoke(app, [name, model if model.endswith("plan.json") else "config.json", *options])
        assert done.exit_code == 0, f"{command}\n{done.output}"
