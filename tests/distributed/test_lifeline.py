"""One rank raises, or dies: all end, that rank's message first. Ranks that are about to run different things stop before any collective."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.two_machines import emulate
from hf_osdp.distributed import lifeline
from hf_osdp.distributed import shutdown as ending
from hf_osdp.distributed.consensus import on_rank_zero, require_same_run
from hf_osdp.distributed.roll_call import compare_versions
from hf_osdp.errors import PlanError, PlanMismatchError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.exits import run_script
from hf_osdp.measurement.loop_meter import LoopMeter
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.sharding.environment import form_process_group
from tests.helpers.distributed import run_ranks
from tests.helpers.ending import die, endings

ROOT = Path(__file__).parents[2]


def start(*, early: bool = True) -> int:
    """Form the group, by the roll call or before it. Returns the rank."""
    ending._GRACE_S = 0.5
    if early:
        form_process_group(needed=True)
    else:
        dist.init_process_group("gloo")
        compare_versions()
    assert lifeline.current() is not None
    return dist.get_rank()


def said_before(text: str, *later: str) -> bool:
    """Whether a line of ours stands there once, before all else that is named."""
    assert text.count("hf_osdp: Rank") == 1, text
    return all(text.index("hf_osdp: Rank") < text.index(one) for one in later if one in text)


def while_rank_0_plans() -> None:
    if start() == 2:
        raise KeyError("the reason")
    on_rank_zero(lambda: time.sleep(60))


def test_an_exception_while_rank_0_plans():
    ended = endings(while_rank_0_plans, 3)
    assert all(one.code == 1 and one.after_s < ending.END_S for one in ended)
    assert "KeyError: 'the reason'" in ended[2].output and "while_rank_0_plans" in ended[2].output and "hf_osdp:" not in ended[2].output
    assert said_before(ended[0].output) and "failed, and all ranks end: KeyError: 'the reason'" in ended[0].output
    assert ended[1].output == "", "one rank of the machine speaks"


def in_a_step(dying: int) -> None:
    if start(early=False) == dying:
        die()
    dist.all_reduce(torch.ones(1))
    time.sleep(60)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_death_in_a_step(dying):
    """Gloo then raises on the others, and says that a connection was lost: that comes after the cause."""
    ended = endings(in_a_step, 3, dying)
    assert ended[dying].code == -9 and all(one.code == 1 and one.after_s < ending.END_S for one in ended if one is not ended[dying])
    speaker, silent = (ended[1], ended[2]) if dying == 0 else (ended[0], ended[2])
    assert said_before(speaker.output, "Traceback", "onnection") and f"Rank {dying} on" in speaker.output
    assert "ended without a word, and all ranks end" in speaker.output and "hf_osdp:" not in silent.output


def before_there_is_a_line() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        die()
    compare_versions()


def test_a_death_before_there_is_a_line():
    """The group was formed by `TrainingArguments`, and a rank dies while it reads the data: gloo knows."""
    ended = endings(before_there_is_a_line, 3)
    assert all(ended[rank].code == 1 and ended[rank].after_s < ending.END_S for rank in (0, 2))
    assert "LaunchError: A rank ended while ranks compared what they are about to run" in ended[0].output


def refused(everywhere: bool) -> None:
    """As a recipe ends where its input is at fault."""

    def main() -> None:
        if start() == 1 or everywhere:
            raise PlanError("no good")
        time.sleep(60)

    ending._GRACE_S = 0.5
    run_script(main)


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_error_in_one_line_is_said_once(everywhere):
    ended = endings(refused, 2, everywhere)
    assert ended[1].output == "" and ended[1].code == 2
    if everywhere:
        assert (ended[0].output, ended[0].code) == ("error: no good\n", 2)
    else:
        assert ended[0].output.endswith("failed, and all ranks end: PlanError: no good\n") and ended[0].code == 1
    assert all(one.after_s < ending.END_S for one in ended)


def with_another_hook() -> None:
    rank = start()
    sys.excepthook = lambda *shown: print("shown elsewhere")
    if rank == 1:
        raise KeyError("the reason")
    time.sleep(60)


def test_an_exception_whose_hook_another_package_has_taken():
    ended = endings(with_another_hook, 2)
    assert all(one.code == 1 and one.after_s < ending.END_S for one in ended)
    assert ended[1].output == "shown elsewhere\n" and "failed, and all ranks end: KeyError: 'the reason'" in ended[0].output


def in_a_finally(folder: str) -> None:
    """Ranks come together for the end of a checkpoint in the background, and for what the loop's first steps took."""
    ending._GRACE_S = 0.5
    accelerator = OSDPAccelerator(cpu=True, osdp={"async_save": True})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    accelerator._watch = LoopMeter(model, torch.device("cpu"), accelerator._tell)
    try:
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
        accelerator.save_state(folder)
        if accelerator.process_index == 1:
            raise KeyError("the reason")
        time.sleep(60)
    finally:
        accelerator.end_training()


def test_an_exception_on_its_way_through_the_end_of_training(tmp_path):
    ended = endings(in_a_finally, 2, str(tmp_path / "checkpoint"))
    assert all(one.code == 1 and one.after_s < ending.END_S for one in ended)
    assert ended[1].output.endswith("KeyError: 'the reason'\n") and "onnection" not in ended[1].output
    assert said_before(ended[0].output) and "failed, and all ranks end: KeyError: 'the reason'" in ended[0].output


def one_after_the_other() -> None:
    """Twice on the line, a fork that lives longer, errors that ended nothing, and the ranks leave one by one."""
    sys.last_value = KeyError("of a notebook's earlier cell")
    rank = start()
    first = lifeline.current()
    compare_versions()
    assert lifeline.current() is first
    try:
        raise KeyError("caught")
    except KeyError:
        pass
    if os.fork() == 0:
        assert lifeline.current() is None
        time.sleep(1.5)
        os._exit(0)
    dist.barrier()
    time.sleep(0.3 * (1 - rank))
    assert lifeline.current().verdict is None
    print("done")


def test_normal_ends_end_nobody():
    assert [(one.code, one.output) for one in endings(one_after_the_other, 2)] == [(0, "done\n")] * 2


def with_a_fork_that_lives_on() -> None:
    rank = start()
    if rank == 1 and os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    dist.barrier()
    if rank == 1:
        die()
    time.sleep(60)


def test_a_fork_does_not_hide_a_death():
    """Workers of a DataLoader have the dead rank's files open."""
    ended = endings(with_a_fork_that_lives_on, 2)
    assert ended[0].code == 1 and ended[0].after_s < ending.END_S and said_before(ended[0].output)


# ------------------------------------------------------------------------------------------------- ranks that differ

PLANS = [
    Plan(
        world_size=3, strategy="osdp", units=(UnitDecision(fqn="", shard_size=3, reshard_after_forward=False),), micro_batch_size=size,
        accumulation_steps=1, model_fingerprint="abc",
    )
    for size in (1, 2)
]  # fmt: skip


def differing(folder: str) -> dict[str, str]:
    """The line of each way to differ; of the last, whether the ranks could go on."""
    rank = start()
    here = Path(folder) / str(rank)
    here.mkdir()
    os.chdir(here)
    if rank < 2:
        PLANS[rank].save(Path("plan.json"))
    odd = rank == 1
    ways = {
        "model": (torch.nn.Linear(2, 3 if odd else 2), {}),
        "dtype": (torch.nn.Linear(2, 2).to(torch.float64 if odd else torch.float32), {}),
        "device": (None, {"device_type": "cuda" if odd else "cpu"}),
        "plan": (None, {"plan": PLANS[odd]}),
        "no plan": (None, {"plan": None if odd else PLANS[0]}),
        "file": (None, {"plan": "plan.json"}),
        "options": (None, {"asked": OSDPConfig(strategy="ddp" if odd else "osdp", memory_limit=1000 + rank, sequence_length=8 + rank)}),
    }
    return {name: line_of(model, **what) for name, (model, what) in ways.items()} | {"same": line_of(None, plan=PLANS[0])}


def line_of(model: torch.nn.Module | None, asked: OSDPConfig | None = None, **more: object) -> str:
    try:
        require_same_run(model or torch.nn.Linear(2, 2), *([asked] if asked else []), **more)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_are_about_to_run_different_things_stop_with_one_line(tmp_path):
    found = run_ranks(differing, 3, str(tmp_path), init=False)
    assert found[0] == found[1] == found[2]
    lines = found[0]
    assert lines.pop("same") == ""
    assert all(line.startswith("Ranks are about to run different things: ") and line.count("; ") == 0 for line in lines.values())
    first, other = (plan.fingerprint for plan in PLANS)
    assert "the model is Linear (2 tensors, 6 elements, " in lines["model"] and ") on ranks 0, 2, Linear (2 tensors, 9" in lines["model"]
    assert "the model is Linear (2 tensors, 6 elements, " in lines["dtype"]
    assert "device_type is 'cpu' on ranks 0, 2, 'cuda' on rank 1." in lines["device"]
    assert f"plan is {first} on ranks 0, 2, {other} on rank 1." in lines["plan"]
    assert f"plan is {first} on ranks 0, 2, left out on rank 1." in lines["no plan"]
    assert f"plan is {first} on rank 0, {other} on rank 1." in lines["file"], "rank 2 has no such file, and takes rank 0's"
    assert "strategy is 'osdp' on ranks 0, 2, 'ddp' on rank 1." in lines["options"]


GPUS = {
    "name": ("NVIDIA A100-SXM4-80GB", 85_000_000_000, "Tesla V100-SXM2-16GB", 17_000_000_000),
    "memory": ("NVIDIA A100", 40 * 2**30, "NVIDIA A100", 39 * 2**30),
    "nearly the same": ("NVIDIA A100", 40 * 2**30, "NVIDIA A100", 40 * 2**30 - 2**29),
}  # fmt: skip


def on_gpus() -> dict[str, str]:
    rank = start()
    found = {}
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
    for name, (*first, other_name, other_memory) in GPUS.items():
        own = SimpleNamespace(**dict(zip(("name", "total_memory"), (other_name, other_memory) if rank == 1 else first, strict=True)))
        torch.cuda.get_device_properties = lambda device, own=own: own
        found[name] = line_of(None, device_type="cuda")
        found[f"{name}, on the CPU"] = line_of(None, device_type="cpu")
    return found


def test_gpus_of_two_kinds_stop_all_ranks():
    lines, same = run_ranks(on_gpus, 2, init=False)
    assert lines == same
    said = (
        "Ranks are about to run different things: the device is {} on rank 0, {} on rank 1. Run the same program with the same arguments"
        " on every rank. Plans are made for devices of one kind; CUDA_VISIBLE_DEVICES chooses those of a machine."
    )
    assert lines.pop("name") == said.format("NVIDIA A100-SXM4-80GB with 81062 MiB", "Tesla V100-SXM2-16GB with 16212 MiB")
    assert lines.pop("memory") == said.format("NVIDIA A100 with 40960 MiB", "NVIDIA A100 with 39936 MiB")
    assert len(lines) == 4 and not any(lines.values())


# -------------------------------------------------------------------------------------------------------- real launchers

UNDER_TORCHRUN = """
import os, time
from hf_osdp.integrations.exits import run_script
from hf_osdp.sharding.environment import form_process_group

def main():
    form_process_group(needed=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    time.sleep(1 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 60)
    print("trained", flush=True)

run_script(main)
"""
IN_A_NOTEBOOK = """
from accelerate import notebook_launcher

def train(fails):
    import time
    import torch.distributed as dist
    from hf_osdp import OSDPAccelerator
    from hf_osdp.runtime import lifeline
    accelerator = OSDPAccelerator(cpu=True, osdp={})
    assert lifeline.current() is not None
    if fails and accelerator.process_index == 1:
        raise KeyError("the reason")
    time.sleep(60 if fails else 0.5 * accelerator.process_index)
    print("trained", flush=True)

notebook_launcher(train, (False,), num_processes=2, use_port="PORT")
notebook_launcher(train, (True,), num_processes=2, use_port="PORT")
"""

WITHOUT_NETWORK = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
from hf_osdp.sharding.environment import form_process_group

form_process_group(needed=True)
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    subprocess.run(["ip", "link", "set", "veth0", "down"], check=True)
print("at", time.time(), flush=True)
time.sleep(120)
"""
"""Nothing is sent any more, and no connection is closed: as where a machine goes off."""


def run(command: list[str], tmp_path: Path, script: str) -> tuple[subprocess.CompletedProcess[str], float]:
    (tmp_path / "script.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    began = time.monotonic()
    done = subprocess.run([*command, str(tmp_path / "script.py")], env=env, capture_output=True, text=True, timeout=100)
    return done, time.monotonic() - began


@pytest.mark.slow
def test_torchrun_starts_again_after_a_death(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done, _ = run(torchrun, tmp_path, UNDER_TORCHRUN)
    assert done.returncode == 0 and done.stdout == "trained\n" * 2
    assert done.stderr.count("hf_osdp: Rank 1 on") == 1


@pytest.mark.slow
def test_ranks_of_a_notebook_leave_and_fail(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done, took_s = run([sys.executable], tmp_path, IN_A_NOTEBOOK.replace("PORT", port))
    assert done.stdout.count("trained") == 2 and took_s < 50
    assert "KeyError: 'the reason'" in done.stderr
    assert "ended without a word" not in done.stderr


@pytest.mark.slow
def test_a_machine_that_goes_off_ends_all_within_30_seconds(tmp_path):
    try:
        emulate.ways_in(emulate.UNLIMITED)
    except emulate.NotPermitted as error:
        pytest.skip(f"machines cannot be emulated here: {error}")
    (tmp_path / "script.py").write_text(WITHOUT_NETWORK)
    command = [sys.executable, emulate.__file__, "--ranks=1", "--rate=unlimited", "--timeout=90", "--", str(tmp_path / "script.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100)
    began = max(float(text) for text in re.findall(r"at ([\d.]+)", done.stdout))
    assert done.returncode == 1 and time.time() - began < 35.0, "30 s, and 5 for the launchers to end"
    assert "hf_osdp: Rank 1 on node1 does not answer any more (" in done.stderr
    assert "hf_osdp: Rank 0 on node0 does not answer any more (" in done.stderr
