"""The roll call before a real process group forms, and what a rank that is missing or different does to the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed import roll_call as roll_call_module
from hf_osdp.distributed.roll_call import compare_versions, own_versions, roll_call
from hf_osdp.distributed.stores import call_space, confer
from hf_osdp.errors import LaunchError
from hf_osdp.sharding.environment import form_process_group
from tests.helpers.distributed import run_ranks


def _form_group() -> None:
    form_process_group(needed=True)


def _make_accelerator() -> None:
    from hf_osdp.integrations.accelerator import OSDPAccelerator

    OSDPAccelerator()


def _refusal(form: Callable[[], object]) -> str:
    try:
        form()
    except LaunchError as error:
        return str(error)
    return ""


def _all_ways(before: bool) -> list[str]:
    """While rank 1 says that it has another torch: refused; when it does not: training; when it does again, with a group: refused."""
    rank, true_versions = int(os.environ["RANK"]), own_versions()
    other = {**true_versions, "torch": "1.0" if rank == 1 else true_versions["torch"]}
    refused = []
    if before:  # one store for all three calls
        roll_call_module.own_versions = lambda: other
        refused = [_refusal(_form_group), _refusal(_make_accelerator)]
        assert not dist.is_initialized()
        roll_call_module.own_versions = lambda: true_versions
    assert _refusal(_form_group) == ""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    with roll_call():  # there is a group: nobody is waited for
        compare_versions()
    roll_call_module.own_versions = lambda: other
    return [*refused, _refusal(_make_accelerator)]


@pytest.mark.parametrize("hosts_store", [False, True])
def test_ranks_of_different_versions_stop_and_equal_ones_go_on(hosts_store):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # Without a launcher's store, rank 0 opens one; the group's own store then takes the same port.
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port} if hosts_store else {}
    lines = run_ranks(_all_ways, 2, not hosts_store, init=False, env=env)
    assert lines[0] == lines[1] and len(set(lines[0])) == 1
    assert lines[0][0].startswith("Ranks run different versions: torch is") and "1.0 on rank 1 (" in lines[0][0]


def _form_refused() -> str:
    return _refusal(_form_group)


def test_a_missing_rank_ends_the_others_with_one_line():
    lines = run_ranks(_form_refused, 2, init=False, env={"WORLD_SIZE": "3", "OSDP_LAUNCH_TIMEOUT_S": "1"})
    assert lines[0] == lines[1] and lines[0].startswith("1 of 3 ranks did not report within 1 s: rank 2 (ranks 0-1 on")


def _what_stands_there() -> list[bool]:
    """Two starts in one store of torchrun's: whether the group of each finds what the start before wrote."""
    rank, found = int(os.environ["RANK"]), []
    for _ in range(2):
        with roll_call():
            store = next(dist.distributed_c10d.rendezvous("env://", rank, 2))[0]
            found.append(store.check([f"address/{rank}"]))
            store.set(f"address/{rank}", "of a process that ends")
            dist.init_process_group("gloo")
        dist.destroy_process_group()
    return found


def test_a_restart_finds_nothing_of_the_start_before_in_torchruns_store():
    assert run_ranks(_what_stands_there, 2, init=False) == [[False, False]] * 2


def _calls_after(counted: int) -> str:
    """A group formed without a roll call, where ranks called each other unequally often in the start before."""
    dist.init_process_group("gloo")
    calls = dist.PrefixStore("hf_osdp/calls", dist.distributed_c10d._get_default_store())
    calls.add(f"of_rank/{dist.get_rank()}", dist.get_rank() * counted)
    return str(confer(call_space(), dist.get_rank(), lambda said: f"heard {said}"))


def test_calls_of_the_start_before_do_not_count():
    assert run_ranks(_calls_after, 2, 3, init=False, timeout_s=30) == ["heard [0, 1]"] * 2
