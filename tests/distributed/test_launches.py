"""The README's ways to start several machines: two launchers side by side on this one, two gloo ranks each."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.distributed import ROOT, environment, free_port, run_program
from tests.helpers.output import ends_of

LOOP = """
import json, os, torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=61, n_positions=16, bos_token_id=0, eos_token_id=0))
tokens = torch.randint(0, 61, (1, 16)).expand(2, -1)
sizes, losses = {"sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 2}, []
if "ACCELERATE_USE_FSDP" in os.environ:
    accelerator = OSDPAccelerator(osdp={**sizes, "hardware": "cpu"})
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    plan, backward = accelerator.planned_run.plan, accelerator.backward
else:
    model = OptimalShardedDataParallel(model, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan, backward = model.plan, model.backward
for _ in range(8):
    loss = model(input_ids=tokens, labels=tokens).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
told = {"world": torch.distributed.get_world_size(), "hardware": plan.hardware, "first": losses[0], "last": losses[-1]}
open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(told))
torch.distributed.destroy_process_group()
"""  # noqa: E501
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=1 "$@" & other=$!
SLURM_NODEID=0 "$@"; code=$?
wait $other && exit $code
"""


def commands_of_page() -> list[str]:
    page = (ROOT / "docs" / "several_machines.md").read_text(encoding="utf-8")
    return re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    """Where the commands run: the script, the configurations, and stand-ins for SLURM's programs."""
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\nprintf '127.0.0.1\\nother\\n'\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def path_of(folder: Path) -> str:
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def check_trained(folder: Path) -> None:
    for rank in range(4):
        told = json.loads((folder / f"rank{rank}.json").read_text())
        assert told["world"] == 4 and told["hardware"].startswith("2 nodes x 2 x ")
        assert told["last"] < 0.8 * told["first"]


@pytest.mark.slow
def test_the_batch_file_trains(folder):
    batch = commands_of_page()[2]
    assert "IFNAME=ib0" in batch
    batch = batch.replace("=ib0", "=lo").replace("% 10000", "% 50000")
    slurm = {
        "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": str(int(free_port()) - 20000),
    }  # fmt: skip
    done = run_program(["bash", "-c", batch], cwd=folder, PATH=path_of(folder), **slurm)
    assert done.returncode == 0, ends_of(done.stderr)
    check_trained(folder)


@pytest.mark.slow
def test_torchrun_trains(folder):
    commands = commands_of_page()[1].strip().splitlines()
    assert len(commands) == 2 and "--node-rank 0" in commands[0] and "--node-rank 1" in commands[1]
    port, env, machines = free_port(), environment(PATH=path_of(folder)), []
    for command in commands:
        for given, here in (("10.0.0.1", "127.0.0.1"), ("29500", port), ("per-node 8", "per-node 2")):
            command = command.replace(given, here)
        machines.append(subprocess.Popen(shlex.split(command), cwd=folder, env=env, stderr=subprocess.PIPE, text=True))
    try:
        errors = [machine.communicate(timeout=240)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], ends_of(errors[0])
    check_trained(folder)


@pytest.mark.parametrize("line", [0, 1])
def test_the_configuration_is_what_the_command_line_reads(line):
    """Keys that accelerate does not know would end the launch."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    command = shlex.split(commands_of_page()[0].strip().splitlines()[line])
    assert command[:2] == ["accelerate", "launch"]
    command[command.index("--config_file") + 1] = str(ROOT / "accelerate_configs" / "osdp_two_machines.yaml")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command[2:]))
    assert (args.num_machines, args.num_processes, int(args.machine_rank)) == (2, 16, line)
    assert (args.main_process_ip, int(args.main_process_port)) == ("10.0.0.1", 29500)
    assert "'osdp': True" in str(args.fsdp_sharding_strategy)
