"""Faults on ranks that share a GPU: one is killed, or one runs out of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from hf_osdp.preparation.out_of_memory import is_out_of_memory
from hf_osdp.sharding.environment import form_process_group
from tests.faults.supervision import run_case

from .processes import apart
from .runner import ROOT
from .step import Bench, step

SCRIPT = Path(__file__).parent / "scripts" / "runs_out.py"
LEFT_BYTES = 4 * 2**20
_SMALLEST_BYTES = 2 * 2**20
_NO_PAGES = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:False")
"""Expandable segments grow in pages of 20 MiB."""
ENDS_WITHIN_S = 45.0
"""Time limit: the launcher waits 30 s after SIGTERM before it kills ranks that wait on the GPU, and ranks share
cores.
"""
SAID = re.compile(r"Out of memory on .+? in .+?: the plan was estimated to need [^\n]+")


@step(
    part=2,
    expected_s=60,
    limit_s=180,
    rehearsal_s=30,
    proves="one of 2 ranks is killed or raises in a step: the launcher ends all within seconds, with a message",
)
def killed(bench: Bench) -> None:
    for end in ("killed", "raises"):
        outcome = run_case(end, "ours", ENDS_WITHIN_S, one_gpu=not bench.on_cpu)
        bench.row(rank_1=end, ended_after=f"{outcome['seconds']} s", said=outcome["message"])
        bench.aim(not outcome["seconds"].startswith(">"), f"{end}: the launcher ended after {outcome['seconds']} s")
        bench.aim(outcome["message"] != "none", f"{end}: no rank says what happened")


@step(
    part=2,
    expected_s=90,
    limit_s=300,
    rehearsal_s=45,
    proves="memory runs out: one process and one of 2 ranks; the message, and a program that goes on by a safer plan",
)
def out_of_memory(bench: Bench) -> None:
    cases = ((1, "raise"), (2, "replan")) if bench.rehearses else tuple(product((1, 2), ("raise", "replan")))
    for ranks, on_oom in cases:
        done = runs_out(ranks, on_oom, bench.device.type, timeout_s=max(10.0, bench.left_s - 20))
        plans = re.findall(r"PLAN (\w+)", done.stdout)
        ends, said = done.stdout.count("END\n"), SAID.search(done.stderr)
        bench.row(
            ranks=ranks,
            on_oom=on_oom,
            exit_code=done.returncode,
            plans=len(set(plans)),
            ended=ends,
            said=said[0] if said else "",
        )
        wrong = problem_of(done, ranks, on_oom)
        if wrong:
            print(done.stderr[-6000:], flush=True)
            bench.miss(f"{ranks} ranks, {on_oom}: {wrong}")


def runs_out(ranks: int, on_oom: str, device: str, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run the script under torchrun."""
    restarts = 2 if on_oom == "replan" else 0  # the launcher would also restart after an error that is only explained
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launch, str(SCRIPT), on_oom, device]
    launcher = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output = launcher.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # so that it ends its ranks; killed, it would leave them
        launcher.communicate()
        raise
    return subprocess.CompletedProcess(command, launcher.returncode, *output)


def problem_of(done: subprocess.CompletedProcess[str], ranks: int, on_oom: str) -> str:
    """Return what is wrong after `runs_out`; empty if nothing is."""
    plans, ends = re.findall(r"PLAN (\w+)", done.stdout), done.stdout.count("END\n")
    if not SAID.search(done.stderr):
        return "no line says where memory ran out and what the plan needs"
    if on_oom == "raise":
        return (
            ""
            if done.returncode and not ends and len(plans) == ranks
            else f"code {done.returncode}, {len(plans)} starts, {ends} ends"
        )
    went_on = done.returncode == 0 and ends == ranks and len(set(plans)) == len(plans) // ranks > 1
    return "" if went_on else f"code {done.returncode}, {len(plans)} starts of {len(set(plans))} plans, {ends} ends"


@step(
    part=2, expected_s=30, limit_s=120, rehearsal_s=None,
    proves="what libraries raise when the device is full: a matrix product, a convolution, a first collective",
)  # fmt: skip
def full_device(bench: Bench) -> None:
    for name in _LIBRARY_CALLS:
        kind, text, known = apart(library_error, name, **_NO_PAGES)
        bench.row(call=name, raises=kind, message=text, known="yes" if known else "no")
        bench.aim(known, f"{name}: not known as out of memory: {text}")
    bench.note(f"All but {LEFT_BYTES // 2**20} MiB of the device were taken first.")


def library_error(name: str) -> tuple[str, str, bool]:
    """Return type and text of the error of a call on an almost full device, and whether it is known as out of
    memory; run this apart.
    """
    form_process_group(needed=True)
    small = torch.ones(8, 8, device="cuda")
    held = fill_device()
    try:
        _LIBRARY_CALLS[name](small)
        torch.cuda.synchronize()
    except Exception as error:
        return (
            f"{type(error).__module__}.{type(error).__name__}",
            " ".join(str(error).split())[:400],
            is_out_of_memory(error),
        )
    finally:
        del held
    return "nothing", "", True


def fill_device() -> list[torch.Tensor]:
    """Return tensors that occupy all but about `LEFT_BYTES` of the device, in halves if the allocator refuses one
    tensor.
    """
    held, chunk = [], torch.cuda.mem_get_info()[0]
    while min(chunk, left := torch.cuda.mem_get_info()[0] - LEFT_BYTES) >= _SMALLEST_BYTES:
        try:
            held.append(torch.empty(min(chunk, left), dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            chunk //= 2
    return held


def _first_collective(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


_LIBRARY_CALLS = {
    "matrix product": lambda tensor: tensor @ tensor,
    "convolution": lambda tensor: torch.nn.functional.conv2d(tensor.view(1, 1, 8, 8), tensor.view(1, 1, 8, 8)),
    "first collective": _first_collective,
}
