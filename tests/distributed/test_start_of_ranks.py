"""Ranks that start with other versions, models, options or devices stop with one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed import process_group, restart
from hf_osdp.distributed.consensus import require_same_run
from hf_osdp.distributed.process_group import check_ranks
from hf_osdp.errors import LaunchError, PlanMismatchError
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.environment import form_process_group
from hf_osdp.versions import package_versions
from tests.helpers.distributed import free_port, run_ranks
from tests.helpers.sampling import slow_but


def form() -> int:
    """Form the group, and use it. Returns the rank."""
    form_process_group(needed=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return dist.get_rank()


def make_accelerator() -> None:
    from hf_osdp.integrations.accelerator import OSDPAccelerator

    OSDPAccelerator()


def refusal(form_group: Callable[[], object]) -> str:
    with pytest.raises(LaunchError) as caught:
        form_group()
    return str(caught.value)


def all_ways(before: bool) -> list[str]:
    """Rank 1 has another torch: refused; the same: trains; another, with a group: refused."""
    rank, true_versions = int(os.environ["RANK"]), package_versions()
    other = {**true_versions, "torch": "1.0" if rank == 1 else true_versions["torch"]}
    refused = []
    if before:  # one store for all three calls
        process_group.package_versions = lambda: other
        refused = [refusal(form), refusal(make_accelerator)]
        assert not dist.is_initialized()
        process_group.package_versions = lambda: true_versions
    form()
    check_ranks()
    process_group.package_versions = lambda: other
    return [*refused, refusal(make_accelerator)]


@pytest.mark.parametrize("hosts_store", slow_but([False, True], daily=[True]))
def test_ranks_of_different_versions_stop_and_equal_ones_go_on(hosts_store):
    # Without a launcher's store, rank 0 opens one; the group's own store then takes the same port.
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": free_port()} if hosts_store else {}
    lines = run_ranks(all_ways, 2, not hosts_store, init=False, env=env)
    assert lines[0] == lines[1] and len(set(lines[0])) == 1
    assert lines[0][0].startswith("Ranks run different versions: torch is") and "1.0 on rank 1 (" in lines[0][0]


@pytest.mark.on_ranks(2, init=False, env={"WORLD_SIZE": "3", "OSDP_LAUNCH_TIMEOUT_S": "1"})
def test_missing_rank_ends_the_others_with_one_line():
    assert refusal(form).startswith("1 of 3 ranks did not report within 1 s: rank 2 (ranks 0-1 on")


@pytest.mark.on_ranks(2, init=False, timeout_s=30)
def test_restart_forms_its_group_in_the_earlier_store():
    """Two starts in one store of torchrun's: the second must not find addresses of the first."""
    for _ in range(2):
        form()
        dist.destroy_process_group()


@pytest.mark.on_ranks(2, init=False)
def test_limit_noted_on_one_machine_reaches_all_ranks():
    restart._noted_limit = lambda: 70 if os.environ["RANK"] == "1" else None
    form()
    assert restart.limit_after_oom(100) == 70


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
    model = "the model is Linear (2 tensors, 6 elements, "
    lines = {
        model: line_of(torch.nn.Linear(2, 2).to(torch.float64 if odd else torch.float32)),
        ") on ranks 0, 2, Linear (2 tensors, 9": line_of(torch.nn.Linear(2, 3 if odd else 2)),
        "device_type is 'cpu' on ranks 0, 2, 'cuda' on rank 1.": line_of(device_type="cuda" if odd else "cpu"),
        f"plan is {first} on ranks 0, 2, {other} on rank 1.": line_of(plan=PLANS[odd]),
        f"plan is {first} on ranks 0, 2, left out on rank 1.": line_of(plan=None if odd else PLANS[0]),
        "strategy is 'osdp' on ranks 0, 2, 'ddp' on rank 1.": line_of(
            asked=OSDPConfig(strategy="ddp" if odd else "osdp", memory_limit=2000 + rank, sequence_length=8 + rank)
        ),
    }
    for part, line in lines.items():
        assert line.startswith("Ranks are about to run different things: ") and part in line and "; " not in line
    for same in (PLANS[0], f"{rank}.json"):
        require_same_run(torch.nn.Linear(2, 2), plan=same)


@pytest.mark.on_ranks(2, init=False)
def test_gpus_of_two_kinds_stop_all_ranks():
    rank = form()
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
    said = (
        "Ranks are about to run different things: the device is {} on rank 0, {} on rank 1. Run the same program with"
        " the same arguments"
        " on every rank. Plans need devices of one kind; select them by CUDA_VISIBLE_DEVICES on each machine."
    )
    a100, v100 = "NVIDIA A100 with 40960 MiB", "Tesla V100-SXM2-16GB with 16212 MiB"
    for name, memory, other in (
        ("Tesla V100-SXM2-16GB", 17_000_000_000, v100),
        ("NVIDIA A100", 39 * 2**30, "NVIDIA A100 with 39936 MiB"),
        ("NVIDIA A100", 40 * 2**30 - 2**29, ""),  # nearly the same
    ):
        own = (
            SimpleNamespace(name=name, total_memory=memory)
            if rank
            else SimpleNamespace(name="NVIDIA A100", total_memory=40 * 2**30)
        )
        torch.cuda.get_device_properties = lambda device, own=own: own
        require_same_run(torch.nn.Linear(2, 2), device_type="cpu")
        if other:
            assert line_of(device_type="cuda") == said.format(a100, other)
        else:
            require_same_run(torch.nn.Linear(2, 2), device_type="cuda")
