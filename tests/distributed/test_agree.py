"""Ranks start alike, run one plan, say an error once and end together, or all stop with one line."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp import last_checkpoint
from hf_osdp.checkpoint import writer
from hf_osdp.distributed import consensus, process_group, restart, said_once
from hf_osdp.distributed.consensus import on_rank_zero, require_same_run
from hf_osdp.distributed.stop import EXIT_CODE, StopSignal
from hf_osdp.errors import (
    DescriptionError,
    HardwareError,
    InfeasibleError,
    OSDPError,
    PlanError,
    PlanMismatchError,
    Remedy,
)
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.environment import form_process_group
from hf_osdp.versions import package_versions
from tests.helpers.distributed import ranks_of


class OwnPlanError(PlanError):
    """A subclass that other ranks may not know."""


REMEDIES = (Remedy("10 devices", "--num-nodes 10"), Remedy("less"))
INFEASIBLE = {"memory_limit_bytes": 5, "least_peak_bytes": 9, "remedies": REMEDIES}
RAISED = (
    (InfeasibleError("No plan fits.", **INFEASIBLE), InfeasibleError, "No plan fits. Use 10 devices; or less."),
    (PlanError("bad plan"), PlanError, "bad plan"),
    (DescriptionError("no block"), DescriptionError, "no block"),
    (HardwareError("no link"), HardwareError, "no link"),
    (ValueError("bad\n value"), ValueError, "bad value"),
    (OwnPlanError("odd plan"), PlanError, "odd plan"),
    (KeyError("wte"), OSDPError, "Rank 0 failed with KeyError: 'wte'"),
)


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.on_ranks(3, shared=True)
def test_on_rank_zero_gives_all_the_result_or_raises_its_error_on_every_rank():
    calls: list[int] = []
    assert on_rank_zero(lambda: calls.append(1) or {"a": (1, 2)}) == {"a": (1, 2)}
    assert calls == [1] * (dist.get_rank() == 0)
    for error, expected, message in RAISED:
        with pytest.raises(expected) as caught:
            on_rank_zero(functools.partial(fail, error))
        assert (type(caught.value), str(caught.value)) == (expected, message)
        kept = type(error) if dist.get_rank() == 0 else type(None)
        assert type(caught.value.__cause__) is kept, "rank 0 keeps the traceback"
        if expected is InfeasibleError:
            assert vars(caught.value) == {**INFEASIBLE, "finding": "No plan fits."}
            assert caught.value.on_command_line == "No plan fits. Use --num-nodes 10; or less."
    with pytest.raises(OSDPError):
        on_rank_zero(lambda: lambda: "a local function cannot be pickled")
    with pytest.raises(KeyboardInterrupt if dist.get_rank() == 0 else OSDPError):
        on_rank_zero(functools.partial(fail, KeyboardInterrupt("stop")))
    assert on_rank_zero(lambda: "yes") == "yes", "still in step"


@pytest.mark.parametrize(("rank", "local_rank", "waits_s"), [(0, 0, []), (1, 1, [10.0]), (8, 0, [5.0])])
def test_ranks_print_errors_of_this_package_after_rank_zero(monkeypatch, capsys, rank, local_rank, waits_s):
    for name, value in {"WORLD_SIZE": 16, "RANK": rank, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))
    waited_s: list[float] = []
    monkeypatch.setattr(said_once.time, "sleep", waited_s.append)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    said_once.say_uncaught_once()
    for error in (PlanError("the plan\nis damaged"), RuntimeError("not ours")):
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
    ours, *others = capsys.readouterr().err.splitlines()
    assert ours == "PlanError: the plan is damaged" and waited_s == waits_s
    assert others[0].startswith("Traceback") and others[-1] == "RuntimeError: not ours"


def form() -> int:
    """Form the group, and use it. Returns the rank."""
    form_process_group(needed=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return dist.get_rank()


@pytest.mark.on_ranks(2, init=False, timeout_s=30)
def test_restart_forms_its_group_in_the_earlier_store_and_takes_the_lowest_limit():
    """Two starts in one store of torchrun's: the second must not find addresses of the first."""
    restart._noted_limit = lambda: 70 if os.environ["RANK"] == "1" else None
    for _ in range(2):
        process_group._meet.cache_clear()  # as a new process begins
        form()
        assert restart.limit_after_oom(100) == 70, "noted on the other machine"
        dist.destroy_process_group()


PLANS = [
    Plan(
        world_size=3, strategy="osdp", units=(UnitDecision(fqn="", shard_size=3, reshard_after_forward=False),),
        micro_batch_size=size,
        accumulation_steps=1, model_fingerprint="abc",
    )
    for size in (1, 2)
]  # fmt: skip


def line_of(model: torch.nn.Module | None = None, asked: OSDPConfig | None = None, **more: object) -> str:
    with pytest.raises(PlanMismatchError) as caught:
        require_same_run(model or torch.nn.Linear(2, 2), *([asked] if asked else []), **more)
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, str(caught.value))
    assert set(lines) == {lines[0]}, "all ranks say the same"
    return lines[0]


@pytest.mark.on_ranks(3, init=False)
def test_ranks_about_to_run_different_things_stop_with_one_line():
    rank = form()
    odd = rank == 1
    first, other = (plan.fingerprint for plan in PLANS)
    lines = {
        "; dtypes of parameters is torch.float32 on ranks 0, 2, torch.float64 on rank 1.": line_of(
            torch.nn.Linear(2, 2).to(torch.float64 if odd else torch.float32)
        ),
        ") on ranks 0, 2, Linear (2 tensors, 9": line_of(torch.nn.Linear(2, 3 if odd else 2)),
        "device_type is 'cpu' on ranks 0, 2, 'cuda' on rank 1.": line_of(device_type="cuda" if odd else "cpu"),
        f"plan is {first} on ranks 0, 2, {other} on rank 1.": line_of(plan=PLANS[odd]),
        f"plan is {first} on ranks 0, 2, left out on rank 1.": line_of(plan=None if odd else PLANS[0]),
        "strategy is 'osdp' on ranks 0, 2, 'ddp' on rank 1.": line_of(
            asked=OSDPConfig(strategy="ddp" if odd else "osdp", memory_limit=2000 + rank, sequence_length=8 + rank)
        ),
    }
    for part, line in lines.items():
        assert line.startswith("Ranks are about to run different things: ") and part in line
        assert "; " not in line.replace(part, "")
    require_same_run(torch.nn.Linear(2, 2), plan=PLANS[0])
    versions = package_versions()
    consensus.package_versions = lambda: {**versions, "torch": "1.0" if odd else versions["torch"]}
    assert "torch is" in (line := line_of()) and "1.0 on rank 1. " in line


@pytest.mark.on_ranks(2, init=False)
def test_gpus_of_two_kinds_stop_all_ranks():
    rank = form()
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
    said = "Ranks are about to run different things: the device is {} on rank 0, {} on rank 1. Run the same program"
    a100, v100 = "NVIDIA A100 with 40960 MiB", "Tesla V100-SXM2-16GB with 16212 MiB"
    for name, memory, other in (
        ("Tesla V100-SXM2-16GB", 17_000_000_000, v100),
        ("NVIDIA A100", 39 * 2**30, "NVIDIA A100 with 39936 MiB"),
        ("NVIDIA A100", 40 * 2**30 - 2**29, ""),  # nearly the same
    ):
        own = {"name": name, "total_memory": memory} if rank else {"name": "NVIDIA A100", "total_memory": 40 * 2**30}
        torch.cuda.get_device_properties = lambda device, own=own: SimpleNamespace(**own)
        require_same_run(torch.nn.Linear(2, 2), device_type="cpu")
        if other:
            line = line_of(device_type="cuda")
            assert line.startswith(said.format(a100, other)) and "Plans need devices of one kind" in line
        else:
            require_same_run(torch.nn.Linear(2, 2), device_type="cuda")


def stopped_while_it_writes(folder: str) -> None:
    form_process_group(needed=True)
    complete = writer.complete

    def slow(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does where another rank has ended
        time.sleep(0.5)
        complete(*args, **kwargs)
        print("complete")

    writer.complete = slow
    writes = writer.CheckpointWriter(in_background=True)
    with StopSignal() as stop:
        for step in range(10):
            if step == 3 and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed():
                with writes.new(Path(folder) / f"checkpoint-{step}"):
                    pass
                break
    stop.exit()


def test_checkpoint_in_background_is_complete_before_any_rank_ends(tmp_path):
    with ranks_of(stopped_while_it_writes, 2, str(tmp_path), init=False, timeout_s=30) as ranks:
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.01)
        assert [(rank.returncode, rank.output) for rank in ranks] == [(EXIT_CODE, "complete\n"), (EXIT_CODE, "")]
    assert last_checkpoint(tmp_path).name == "checkpoint-4"
