"""The README's two commands are the first thing in it, one line each, and CI runs the second."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAIN_JOB = "accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm.py recipes/gpt2/demo.yaml"


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [block.strip() for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)]


def test_readme_begins_with_two_commands_of_one_line():
    main_job, tests = commands()[:2]
    assert "\n" not in main_job and "\n" not in tests
    assert main_job.endswith(MAIN_JOB)
    assert tests.endswith("-m pytest -n 2 --dist loadfile")


def test_ci_runs_second_command_of_readme():
    assert commands()[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_files_that_commands_name_exist():
    for name in (
        "constraints.txt",
        "accelerate_configs/osdp_cpu.yaml",
        "recipes/run_clm.py",
        "recipes/gpt2/demo.yaml",
    ):
        assert (ROOT / name).is_file()


def test_constraints_pin_versions_without_addresses():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pinned
    assert all("==" in line and "://" not in line and "@" not in line for line in pinned)
