"""The check of ranks at the start: who is missing, who differs, what an earlier start left in the store."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from hf_osdp.distributed import process_group
from hf_osdp.distributed.process_group import (
    RankReport,
    _collect,
    _report,
    check_ranks,
    difference_line,
    mismatch_line,
    missing_line,
    own_versions,
)  # fmt: skip
from hf_osdp.errors import LaunchError


def report(rank: int, *, ranks: int = 2, host: str = "a", token: str = "", torch: str = "2.13") -> RankReport:
    return RankReport(rank=rank, host=host, ranks=ranks, token=token or f"{rank}-{host}", limit=None, versions={"torch": torch})


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def start(store: TCPStore, *mine: RankReport, limit_s: float = 5.0) -> list[object]:
    """Let ranks come at the same time. Returns what each got: the reports of all, or the error."""
    found: list[object] = [None] * len(mine)

    def one(number: int) -> None:
        own = store if number == 0 else TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
        act = _collect if mine[number].rank == 0 else _report
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


def test_check_gives_every_rank_the_reports_of_all(store):
    ranks = [report(0, ranks=3), report(1, ranks=3), report(2, ranks=3, host="b")]
    assert start(store, *ranks) == [ranks] * 3


def test_check_ignores_what_an_earlier_start_left(store):
    start(store, report(0), report(1))
    store.set("default_pg/0//cpu//0/0", "the address of a process that has ended")
    again = [report(0, token="new 0"), report(1, token="new 1")]
    assert start(store, *again) == [again] * 2
    assert not store.check(["default_pg/0//cpu//0/0"])


def test_check_names_a_missing_rank_at_the_limit(store):
    reports = start(store, report(0, ranks=4), report(1, ranks=4, host="b"), limit_s=0.5)[0]
    line = missing_line(reports, waited_s=0.5)
    assert line.startswith("2 of 4 ranks did not report within 0.5 s: ranks 2-3 (ranks 0-1 on a, b did).")
    assert missing_line([report(0), report(1)], waited_s=1) is None


def test_check_refuses_a_process_that_rank_0_does_not_count(store, monkeypatch):
    monkeypatch.setattr(process_group, "_READ_S", 0.5)
    found = start(store, report(0), report(1), report(1, host="b"), limit_s=1.0)
    lines = [text for text in found if isinstance(text, str)]
    assert len(lines) == 1 and "waited 1 s at" in lines[0] and "--machine_rank" in lines[0]
    alone = start(store, report(1, token="late"), limit_s=0.2)
    assert "for rank 0, which counts 2 ranks, and this process 2" in alone[0]


def test_difference_line_names_versions_ranks_and_hosts():
    assert difference_line([report(0), report(1, host="b")]) is None
    line = difference_line([report(0), report(1, host="b", torch="2.11"), report(2, host="b", torch="2.11")])
    assert line.startswith("Ranks run different versions: torch is 2.13 on rank 0 (a), 2.11 on ranks 1-2 (b).")
    assert "the number of ranks is 2 on rank 0 (a), 3 on rank 1 (b)" in difference_line([report(0), report(1, host="b", ranks=3)])


def test_mismatch_line_names_what_ranks_run():
    assert mismatch_line([{"plan": "x"}, {"plan": ""}, {"plan": "x"}]) is None, "an empty text agrees with all"
    line = mismatch_line([{"plan": "x", "model": "m"}, {"plan": "y", "model": "m"}, {"plan": "x"}])
    assert "plan is x on ranks 0, 2, y on rank 1; model is m on ranks 0-1, not known on rank 2" in line


@pytest.mark.parametrize("value", ["soon", "-5", "0", "inf"])
def test_check_refuses_a_limit_that_is_no_number_of_seconds(monkeypatch, value):
    monkeypatch.setenv("OSDP_LAUNCH_TIMEOUT_S", value)
    with pytest.raises(ValueError, match=f"OSDP_LAUNCH_TIMEOUT_S={value} is not a number of seconds above 0"):
        check_ranks()


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}])
def test_check_returns_at_once_in_a_single_process(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_ranks(timeout_s=0.1)


def test_own_versions_are_json():
    assert json.loads(json.dumps(own_versions())) == own_versions() and "torch" in own_versions()
