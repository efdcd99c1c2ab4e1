"""Ranks at the start: versions, models, options and devices that differ stop all with one line; a restart finds an empty store."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed import process_group
from hf_osdp.distributed.consensus import require_same_run
from hf_osdp.distributed.process_group import check_ranks, own_versions
from hf_osdp.errors import LaunchError, PlanMismatchError
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.sharding.environment import form_process_group
from tests.helpers.distributed import run_ranks


def form() -> int:
    """Form the group. Returns the rank."""
    form_process_group(needed=True)
    return dist.get_rank()


def make_accelerator() -> None:
    from hf_osdp.integrations.accelerator import OSDPAccelerator

    OSDPAccelerator()


def refusal(form_group: Callable[[], object]) -> str:
    try:
        form_group()
    except LaunchError as error:
        return str(error)
    return ""


def all_ways(before: bool) -> list[str]:
    """While rank 1 says that it has another torch: refused; when it does not: training; when it does again, with a group: refused."""
    rank, true_versions = int(os.environ["RANK"]), own_versions()
    other = {**true_versions, "torch": "1.0" if rank == 1 else true_versions["torch"]}
    refused = []
    if before:  # one store for all three calls
        process_group.own_versions = lambda: other
        refused = [refusal(form), refusal(make_accelerator)]
        assert not dist.is_initialized()
        process_group.own_versions = lambda: true_versions
    assert refusal(form) == ""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    check_ranks()
    process_group.own_versions = lambda: other
    return [*refused, refusal(make_accelerator)]


@pytest.mark.parametrize("hosts_store", [False, True])
def test_ranks_of_different_versions_stop_and_equal_ones_go_on(hosts_store):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # Without a launcher's store, rank 0 opens one; the group's own store then takes the same port.
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port} if hosts_store else {}
    lines = run_ranks(all_ways, 2, not hosts_store, init=False, env=env)
    assert lines[0] == lines[1] and len(set(lines[0])) == 1
    assert lines[0][0].startswith("Ranks run different versions: torch is") and "1.0 on rank 1 (" in lines[0][0]


def form_refused() -> str:
    return refusal(form)


def test_a_missing_rank_ends_the_others_with_one_line():
    lines = run_ranks(form_refused, 2, init=False, env={"WORLD_SIZE": "3", "OSDP_LAUNCH_TIMEOUT_S": "1"})
    assert lines[0] == lines[1] and lines[0].startswith("1 of 3 ranks did not report within 1 s: rank 2 (ranks 0-1 on")


def form_twice() -> float:
    """Two starts in one store of torchrun's: the second must not find addresses of the first."""
    for _ in range(2):
        form_process_group(needed=True)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
    return total.item()


def test_a_restart_forms_its_group_in_the_store_of_the_start_before():
    assert run_ranks(form_twice, 2, init=False, timeout_s=30) == [2.0, 2.0]


def tell_limit() -> str:
    process_group.lowered_limit = lambda: 70 if os.environ["RANK"] == "1" else None
    form()
    return os.environ.get("OSDP_MEMORY_LIMIT_AFTER_OOM", "")


def test_a_limit_noted_on_one_machine_reaches_all_ranks():
    assert run_ranks(tell_limit, 2, init=False) == ["70", "70"]


# ------------------------------------------------------------------------------------------------- ranks that differ

PLANS = [
    Plan(
        world_size=3, strategy="osdp", units=(UnitDecision(fqn="", shard_size=3, reshard_after_forward=False),), micro_batch_size=size,
        accumulation_steps=1, model_fingerprint="abc",
    )
    for size in (1, 2)
]  # fmt: skip


def differing() -> dict[str, str]:
    """The line of each way to differ; of the last, whether the ranks could go on."""
    rank = form()
    odd = rank == 1
    ways = {
        "model": (torch.nn.Linear(2, 3 if odd else 2), {}),
        "dtype": (torch.nn.Linear(2, 2).to(torch.float64 if odd else torch.float32), {}),
        "device": (None, {"device_type": "cuda" if odd else "cpu"}),
        "plan": (None, {"plan": PLANS[odd]}),
        "no plan": (None, {"plan": None if odd else PLANS[0]}),
        "options": (None, {"asked": OSDPConfig(strategy="ddp" if odd else "osdp", memory_limit=1000 + rank, sequence_length=8 + rank)}),
    }
    same = line_of(None, plan=PLANS[0]) + line_of(None, plan=f"{rank}.json")
    return {name: line_of(model, **what) for name, (model, what) in ways.items()} | {"same": same}


def line_of(model: torch.nn.Module | None, asked: OSDPConfig | None = None, **more: object) -> str:
    try:
        require_same_run(model or torch.nn.Linear(2, 2), *([asked] if asked else []), **more)
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_are_about_to_run_different_things_stop_with_one_line():
    found = run_ranks(differing, 3, init=False)
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
    assert "strategy is 'osdp' on ranks 0, 2, 'ddp' on rank 1." in lines["options"]


GPUS = {
    "name": ("NVIDIA A100-SXM4-80GB", 85_000_000_000, "Tesla V100-SXM2-16GB", 17_000_000_000),
    "memory": ("NVIDIA A100", 40 * 2**30, "NVIDIA A100", 39 * 2**30),
    "nearly the same": ("NVIDIA A100", 40 * 2**30, "NVIDIA A100", 40 * 2**30 - 2**29),
}  # fmt: skip


def on_gpus() -> dict[str, str]:
    rank = form()
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
