"""A rank that is not heard from is named once, and again when it answers."""

from __future__ import annotations

import logging

import pytest
from torch.distributed import HashStore

from hf_osdp.distributed.heartbeat import SILENT_BEATS, Heartbeat


@pytest.fixture
def ranks() -> tuple[Heartbeat, Heartbeat]:
    store = HashStore()
    first, second = Heartbeat(store, 0, 2), Heartbeat(store, 1, 2)
    second.beat()
    first.beat()
    return first, second


def test_heartbeat_warns_once_of_a_silent_rank_and_tells_its_return(ranks, caplog):
    first, second = ranks
    for _ in range(3 * SILENT_BEATS):
        first.beat()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Rank 1 on " in caplog.text and "has not been heard from for 30 s" in caplog.text
    second.beat()
    first.beat()
    assert "is heard from again, after 90 s" in caplog.messages[1] and len(caplog.messages) == 2


def test_heartbeat_is_silent_while_all_beat_or_have_ended(ranks, caplog):
    first, second = ranks
    for _ in range(2 * SILENT_BEATS):
        first.beat()
        second.beat()
    second._store.set("1", "over")
    for _ in range(2 * SILENT_BEATS):
        first.beat()
    assert not caplog.records


def test_heartbeat_does_not_wait_for_a_rank_that_never_began(caplog):
    alone = Heartbeat(HashStore(), 0, 2)
    for _ in range(2 * SILENT_BEATS):
        alone.beat()
    assert not caplog.records
