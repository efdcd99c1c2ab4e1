"""Ranks report to rank 0 before the process group forms; whatever is wrong is the same line for all. Ranks are threads here."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_osdp.distributed import roll_call as roll_call_module
from hf_osdp.distributed.launched import Launch
from hf_osdp.distributed.rank_reports import RankReport, difference_line, gloo_line, missing_line
from hf_osdp.distributed.roll_call import meet, own_versions, roll_call
from hf_osdp.errors import LaunchError

VERSIONS = {"hf_osdp": "0.1.0", "torch": "2.13.0", "python": "3.11"}


def report(rank: int, **versions: str) -> RankReport:
    return RankReport(rank=rank, host=f"node{rank // 2}", process=100 + rank, versions={**VERSIONS, **versions})


def launch(rank: int, world_size: int = 4) -> Launch:
    return Launch(rank=rank, world_size=world_size, ranks_per_machine=2, address="10.0.0.1", port=29500, hosts_store=False)


@pytest.fixture
def store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Every rank has a connection of its own: a client answers one caller at a time.
    yield lambda: dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=20))


def outcomes(store, ranks: list[tuple[Launch, RankReport]], limit_s: float = 20.0, late_s: float = 0.0) -> list[str]:
    """The error of each rank, or nothing; rank 0 may come later."""

    def attend(who: tuple[Launch, RankReport]) -> str:
        time.sleep(late_s if who[0].rank == 0 else 0.0)
        try:
            meet(store(), *who, limit_s)
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attend, ranks))


def test_all_are_there(store):
    assert outcomes(store, [(launch(rank), report(rank)) for rank in range(4)]) == [""] * 4


def test_a_store_that_was_used_before_serves_again(store):
    """As when a launcher restarts its workers: rank 0 comes last, and the others must not take the old outcome for theirs."""
    ranks = [(launch(rank), report(rank)) for rank in range(4)]
    old = [(who, report(who.rank, torch="2.11.0" if who.rank else "2.13.0")) for who, _ in ranks]
    assert "different versions" in outcomes(store, old)[0]
    assert outcomes(store, ranks, late_s=0.3) == [""] * 4


def test_missing_ranks_are_named_on_all_others(store):
    found = outcomes(store, [(launch(rank), report(rank)) for rank in (0, 1)], limit_s=0.5)
    assert found[0] == found[1]
    assert found[0] == (
        "2 of 4 ranks did not report within 0.5 s: ranks 2-3 (ranks 0-1 on node0 did). They were started, and ended or hang: look at"
        " the output of machine 1. If they only need longer, raise OSDP_LAUNCH_TIMEOUT_S."
    )


def test_rank_0_missing_is_told_by_the_others(store):
    (found,) = outcomes(store, [(launch(1), report(1))], limit_s=0.5)
    assert found.startswith("Rank 1 on node0 waited 0.5 s at 10.0.0.1:29500 for rank 0")


def test_other_versions_are_named_on_all_ranks(store):
    found = outcomes(store, [(launch(rank), report(rank, torch="2.11.0" if rank > 1 else "2.13.0")) for rank in range(4)])
    assert set(found) == {
        "Ranks run different versions: torch is 2.13.0 on ranks 0-1 (node0), 2.11.0 on ranks 2-3 (node1)."
        " Install the same versions on every machine, for example by constraints.txt."
    }


@pytest.mark.parametrize("twin", [0, 1])
def test_a_rank_that_was_started_twice_is_named_on_all(store, twin, monkeypatch):
    monkeypatch.setattr(roll_call_module, "_READ_S", 1.0)  # with two ranks 0, one may wait for a reader that went to the other
    ranks = [(launch(rank), report(rank)) for rank in (0, 1)]
    again = RankReport(rank=twin, host="node1", process=7, versions=VERSIONS)
    found = outcomes(store, [*ranks, (launch(twin), again)])
    assert all(line.startswith(f"Rank {twin} was started twice, on node") for line in found)
    assert all("node0" in line and "node1" in line for line in found)


def test_a_world_of_another_size_is_named_on_all(store):
    found = outcomes(store, [(launch(0, 2), report(0)), (launch(1, 2), report(1)), (launch(2, 4), report(2))])
    said = "Rank 2 on node1 was started as one of 4 ranks, rank 0 on node0 as one of 2;"
    # The first two may have gone on before the third came, which then waits for a rank 0 in vain; it must not go on.
    assert found[2].startswith((said, "Rank 2 on node1 waited "))
    assert all(line == "" or line.startswith(said) for line in found[:2])


def test_a_store_that_nobody_opened_is_one_line_with_the_address(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OSDP_LAUNCH_TIMEOUT_S", "0.3")
    with pytest.raises(
        LaunchError, match=f"could not reach rank 0's machine at 127.0.0.1:{port} within 0.3 s .Connection refused"
    ) as caught:
        with roll_call():
            pytest.fail("nobody else was there")
    assert "main_process_ip" in str(caught.value) and "\n" not in str(caught.value)


def test_a_port_that_is_taken_is_one_line(monkeypatch):
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(LaunchError, match="another run may hold the port"), roll_call(timeout_s=0.5):
            pytest.fail("there was no store")


@pytest.mark.parametrize("value", ["5min", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(monkeypatch, value):
    monkeypatch.setenv("OSDP_LAUNCH_TIMEOUT_S", value)
    with pytest.raises(ValueError, match=f"OSDP_LAUNCH_TIMEOUT_S={value} is not a number of seconds above 0"), roll_call():
        pass


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_without_a_launcher_nobody_is_waited_for(missing):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", missing: ""}
    assert Launch.from_environment(variables) is None


def test_the_launchers_variables():
    variables = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
    found = Launch.from_environment(variables)
    assert (found.rank, found.world_size, found.ranks_per_machine, found.place, found.hosts_store) == (0, 4, 2, "a:1", True)
    assert not Launch.from_environment({**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
    assert Launch.from_environment({**variables, "WORLD_SIZE": "1"}) is None
    with pytest.raises(ValueError, match="MASTER_PORT='http' is not a whole number"):
        Launch.from_environment({**variables, "MASTER_PORT": "http"})


def test_versions_are_those_of_this_process():
    import torch

    found = own_versions()
    assert found["torch"] == torch.__version__ and set(found) == {"hf_osdp", "torch", "accelerate", "transformers", "python"}
    assert "not installed" not in found.values()


def test_where_missing_ranks_are_said_to_be():
    without = {"world_size": 8, "launchers_met": False, "place": "a:1", "waited_s": 300}
    some = missing_line([report(rank) for rank in range(7)], ranks_per_machine=2, **without)
    assert "1 of 8 ranks did not report within 300 s: rank 7 (ranks 0-6 on node0, node1, node2, node3 did)." in some
    assert (
        "Look at the output of machine 3; if they were never started, start them, and check that they reach rank 0's machine at a:1" in some
    )
    assert "output of machines 1-3;" in missing_line([report(0), report(1)], ranks_per_machine=2, **without)
    assert "output of their machines;" in missing_line([report(0)], ranks_per_machine=None, **without)


def test_many_hosts_are_counted():
    reports = [report(rank, torch="2.11.0" if rank == 15 else "2.13.0") for rank in range(16)]
    assert "2.13.0 on ranks 0-14 (node0, node1, node2, node3 and 4 more), 2.11.0 on rank 15 (node7)" in difference_line(reports)


def test_gloo_without_an_interface_is_told_which_variable_to_set():
    reason = "Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:152] timed out connecting"
    line = gloo_line(report(2), interface=None, reason=reason)
    assert "(Gloo connectFullMesh failed with timed out connecting). GLOO_SOCKET_IFNAME is not set" in line
    assert "GLOO_SOCKET_IFNAME is eth7;" in gloo_line(report(2), interface="eth7", reason=reason)
