"""Ranks at the start (who is missing, differs, was started twice), SIGTERM, and nodes from their names."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from hf_osdp.distributed import process_group
from hf_osdp.distributed.mesh import Topology, find_topology, topology_of
from hf_osdp.distributed.process_group import RankReport, _collect, _report, check_ranks, differences, refusal
from hf_osdp.distributed.stop import EXIT_CODE, StopSignal
from hf_osdp.errors import HardwareError, LaunchError


def report(rank: int, *, ranks: int = 2, host: str = "a", token: str = "", torch: str = "2.13") -> RankReport:
    of = {"rank": rank, "host": host, "ranks": ranks, "process": rank, "token": token or f"{rank}-{host}"}
    return RankReport(**of, versions={"torch": torch})


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def start(store: TCPStore, *mine: RankReport, limit_s: float = 5.0) -> list[object]:
    """Let ranks come at the same time. Returns what each got: the reports of all, or the error."""
    found: list[object] = [None] * len(mine)

    def one(number: int) -> None:
        own = store
        if number:
            own = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
        act = _collect if mine[number]["rank"] == 0 else _report
        try:
            found[number] = act(own, mine[number], limit_s)
        except LaunchError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(mine))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_check_gives_every_rank_reports_of_this_start_alone(store):
    start(store, report(0), report(1))
    store.set("default_pg/0//cpu//0/0", "the address of a process that has ended")
    ranks = [report(0, ranks=3, token="new 0"), report(1, ranks=3, token="new 1"), report(2, ranks=3, host="b")]
    assert start(store, *ranks) == [ranks] * 3
    assert not store.check(["default_pg/0//cpu//0/0"])


def test_check_names_missing_rank_at_limit(store):
    reports = start(store, report(0, ranks=4), report(1, ranks=4, host="b"), limit_s=0.5)[0]
    line = refusal(reports, waited_s=0.5)
    assert line.startswith("2 of 4 ranks did not report within 0.5 s: ranks 2-3 (ranks 0-1 on a, b did).")
    assert refusal([report(0), report(1)], waited_s=1) is None


@pytest.mark.parametrize(("in_launchers_store", "least_s"), [(False, 0.0), (True, 0.5)])
def test_check_names_rank_started_twice(store, monkeypatch, in_launchers_store, least_s):
    monkeypatch.setattr(process_group, "_READ_S", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(in_launchers_store))
    began = time.monotonic()
    found = start(store, report(0), report(1), report(1, host="b"), limit_s=0.5)
    (line,) = (text for text in found if isinstance(text, str))
    assert " was started twice: rank 0 at " in line and " counts process 1 on " in line and "--machine_rank" in line
    assert least_s < time.monotonic() - began < least_s + 0.4


def test_check_names_rank_of_another_world(store, monkeypatch):
    monkeypatch.setattr(process_group, "_READ_S", 0.1)
    *_, line = start(store, report(0), report(1), report(2, ranks=3), limit_s=0.2)
    assert "Rank 2 on a was started as one of 3 ranks, and rank 0 at " in line and " as one of 2. " in line


def test_refusal_and_differences_name_values_ranks_and_hosts():
    line = refusal([report(0), report(1, host="b", torch="2.11"), report(2, host="b", torch="2.11")], waited_s=1)
    assert line.startswith("Ranks run different versions: torch is 2.13 on rank 0 (a), 2.11 on ranks 1-2 (b).")
    line = refusal([report(0), report(2, host="b", ranks=3)], waited_s=1)
    assert "the number of ranks is 2 on rank 0 (a), 3 on rank 2 (b)" in line
    assert differences({0: {"plan": "x"}, 1: {"plan": ""}, 2: {"plan": "x"}}) is None, "an empty text agrees with all"
    line = differences({0: {"plan": "x", "model": "m"}, 1: {"plan": "y", "model": "m"}, 2: {"plan": "x"}})
    assert line == "plan is x on ranks 0, 2, y on rank 1; model is m on ranks 0-1, not known on rank 2"


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}]
)
def test_check_returns_at_once_in_single_process(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_ranks()


@pytest.fixture
def came():
    """How often SIGTERM reached whoever had it before."""
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_stop_signal_leaves_forks_to_sigterm(came):
    """Such as a worker that multiprocessing ends, and waits for."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with StopSignal() as stop:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        time.sleep(0.3)  # Python drops signals that come while it forks
        worker.terminate()
        worker.join(5.0)
        code = worker.exitcode
        worker.kill()
        assert code == -signal.SIGTERM
        terminate()
        assert stop.received


def test_stop_signal_ends_loops_and_restores_handler_otherwise(came):
    with StopSignal() as stop:
        terminate()
    assert stop.received and not came
    terminate()
    assert came
    with pytest.raises(KeyError), StopSignal() as stop:
        terminate()
        assert stop.agreed()
        raise KeyError("saving failed")
    terminate()
    assert len(came) == 2


def test_stop_signal_ignores_sigterm_after_loop_that_it_ended(came):
    with StopSignal() as stop:
        terminate()
        assert stop.agreed()
    terminate()
    with pytest.raises(SystemExit) as end:
        stop.exit()
    stop.abandon()
    terminate()
    assert end.value.code == EXIT_CODE and not came
    with stop:  # somebody went on in spite of it
        pass
    terminate()
    assert came


def test_topology_counts_equal_nodes_and_refuses_others():
    assert topology_of(["a", "a", "b", "b", "c", "c"]) == Topology(nodes=3, ranks_per_node=2)
    assert find_topology() == Topology(nodes=1, ranks_per_node=1), "a process alone"
    unequal = r"different numbers of processes \(a: 3, b: 1\); start equally many on each, for example 1"
    for names, said in (
        ("aaab", unequal),
        ("abab", r"Ranks of a are not numbered consecutively; .*--distribution=block"),
    ):
        with pytest.raises(HardwareError, match=said):
            topology_of(list(names))
