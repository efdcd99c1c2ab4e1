"""The lifeline's two ends in one process: who is let in, what is passed on, and what a lost connection means."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time

import pytest
import torch.distributed as dist

from hf_osdp.distributed import lifeline_roles, wire
from hf_osdp.distributed import shutdown as ending
from hf_osdp.distributed.launched import local_rank, one_machine
from hf_osdp.distributed.lifeline_roles import End, Failure, Hub, Member, Spoke
from hf_osdp.distributed.rank_reports import mismatch_line
from hf_osdp.distributed.shutdown import Lifeline, text_of
from hf_osdp.distributed.wire import Connection, Ended, connect, listen
from hf_osdp.errors import LaunchError

TOKEN = "0123456789abcdef"
MEMBERS = [Member(rank=rank, host=f"node{rank // 2}", local_rank=rank % 2) for rank in range(4)]


class Line:
    """Rank 0's end with its thread, and a list of what it hears."""

    def __init__(self, world_size: int):
        listener, (self.host,) = listen("127.0.0.1", one_machine=True)
        self.port = listener.getsockname()[1]
        self.hub = Hub(MEMBERS[0], world_size, listener, self.host, TOKEN)
        self.heard: list[Failure] = []
        threading.Thread(target=self.hub.run, args=(self.heard.append,), daemon=True).start()

    def spoke(self, rank: int, token: str = TOKEN) -> Spoke:
        return Spoke(connect([self.host], self.port), MEMBERS[rank], token)


@pytest.fixture
def line():
    made = Line(3)
    yield made
    made.hub.over = True


def until(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_a_failure_reaches_rank_0_as_of_the_rank_whose_connection_it_is(line):
    spoke = line.spoke(1)
    spoke.send({"kind": "failure", "end": "failed", "text": "KeyError: 'x'", "member": {"rank": 2, "host": "other", "local_rank": 0}})
    assert until(lambda: line.heard)
    assert line.heard == [Failure(member=MEMBERS[1], end=End.FAILED, text="KeyError: 'x'")]
    assert line.heard[0].line == "Rank 1 on node0 failed, and all ranks end: KeyError: 'x'"


def test_a_connection_that_closes_is_a_death_unless_the_rank_said_goodbye(line):
    left, died = line.spoke(1), line.spoke(2)
    assert line.hub.missing(5.0) == []
    left.send({"kind": "bye"})
    left.close()
    assert until(lambda: line.hub.missing(0.0) == [1])
    died.close()
    assert until(lambda: line.heard)
    assert [(failure.member.rank, failure.end) for failure in line.heard] == [(2, End.DIED)]
    assert line.heard[0].line.startswith("Rank 2 on node1 ended without a word, and all ranks end: it was killed")


def test_rank_0_passes_on_and_says_when_all_is_told(line):
    spokes, heard = [line.spoke(1), line.spoke(2)], [[], []]
    for spoke, list_ in zip(spokes, heard, strict=True):
        threading.Thread(target=spoke.run, args=(list_.append,), daemon=True).start()
    assert line.hub.missing(5.0) == []
    failure = Failure(member=MEMBERS[2], end=End.DIED)
    line.hub.send(failure.message())
    assert until(lambda: all(heard)) and heard == [[failure], [failure]]
    assert not spokes[0].told.is_set()
    line.hub.send({"kind": "told"})
    assert spokes[0].told.wait(5.0) and spokes[1].told.wait(5.0)


@pytest.mark.parametrize("bye", [True, False])
def test_rank_0_that_ends_is_heard_of_by_all(line, bye):
    spoke, heard = line.spoke(1), []
    thread = threading.Thread(target=spoke.run, args=(heard.append,), daemon=True)
    thread.start()
    if bye:
        line.hub.send({"kind": "bye"})
    line.hub.over = True
    thread.join(5.0)
    assert not thread.is_alive() and spoke.told.is_set()
    assert [failure.member for failure in heard] == ([] if bye else [MEMBERS[0]])


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1, 2]\n",
        b"[" * 8000 + b"\n",
        b"x" * 9000,
        json.dumps({"kind": "hello", "token": "guessed", "member": {"rank": 1, "host": "a", "local_rank": 0}}).encode() + b"\n",
        json.dumps({"kind": "hello", "token": TOKEN, "member": {"rank": "1", "host": "a", "local_rank": 0}}).encode() + b"\n",
        json.dumps({"kind": "hello", "token": TOKEN}).encode() + b"\n",
        json.dumps({"kind": "failure", "end": "died", "text": ""}).encode() + b"\n",
    ],
)
def test_strangers_are_refused_and_end_nobody(line, sent):
    with socket.create_connection((line.host, line.port), timeout=5) as stranger:
        stranger.sendall(sent)
        try:
            assert stranger.recv(100) == b""
        except ConnectionResetError:
            pass
    assert line.spoke(1) and not line.heard


def test_whoever_says_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(lifeline_roles, "_HELLO_S", 0.2)
    line = Line(2)
    with socket.create_connection((line.host, line.port), timeout=5) as silent:
        assert silent.recv(100) == b""
    line.hub.over = True


def test_a_connection_that_cannot_be_accepted_is_tried_again_and_ends_nothing(monkeypatch):
    tried, accept = [], socket.socket.accept

    def out_of_files(listener: socket.socket) -> tuple[socket.socket, object]:
        tried.append(time.monotonic())
        if len(tried) < 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", out_of_files)
    line = Line(2)
    spoke = line.spoke(1)
    assert line.hub.missing(5.0) == [] and len(tried) == 4 and tried[-1] - tried[0] > 0.2
    spoke.close()
    assert until(lambda: line.heard) and line.heard[0].end is End.DIED
    line.hub.over = True


def test_a_rank_that_reaches_somebody_else_is_told():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as caller:
                caller.sendall(b"220 mail ready\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OSError, match="it is not rank 0 that answers"):
            Spoke(connect(["127.0.0.1"], other.getsockname()[1]), MEMBERS[1], TOKEN)


def test_the_next_address_is_tried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connect(["name.invalid", "127.0.0.1"], port).fileno() > 0
    with pytest.raises(OSError):
        connect(["127.0.0.1"], port)


def test_only_this_machine_can_connect_where_all_ranks_are_on_it():
    listener, hosts = listen("10.1.2.3", one_machine=True)
    assert hosts == ["127.0.0.1"] == [listener.getsockname()[0]]
    listener.close()
    listener, hosts = listen("127.0.1.1", one_machine=False)  # what this machine's own name may stand for here
    assert listener.getsockname()[0] in ("::", "0.0.0.0") and hosts == [socket.gethostname()]
    listener.close()


def test_a_machine_that_is_off_is_known_within_30_seconds():
    listener, hosts = listen(None, one_machine=True)
    connection = connect(hosts, listener.getsockname()[1])
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, probes = (
            sock.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + interval * probes < 30
    listener.close()


def test_what_the_system_says_of_a_lost_connection_is_passed_on():
    class Lost:
        def setsockopt(self, *args: object) -> None: ...

        def recv(self, size: int) -> bytes:
            raise TimeoutError(110, "Connection timed out")

    with pytest.raises(Ended, match="Connection timed out"):
        Connection(Lost()).receive()
    failure = lifeline_roles._loss(MEMBERS[3], "Connection timed out")
    assert failure.line == (
        "Rank 3 on node1 does not answer any more (Connection timed out), and all ranks end: its machine went off, or the network between."
    )


def test_one_rank_of_each_machine_speaks():
    class Silent:
        def run(self, heard) -> None: ...

    lines = [Lifeline(member, Silent(), world_size=4, token=TOKEN) for member in MEMBERS]
    assert [line._speaks_for(MEMBERS[3]) for line in lines[:3]] == [True, False, True]
    assert [line._speaks_for(MEMBERS[0]) for line in lines[1:]] == [True, True, False]


@pytest.mark.parametrize(("dead", "speaker"), [(0, 1), (1, 0), (2, 0)])
def test_one_rank_speaks_where_all_have_the_local_rank_0(dead, speaker):
    class Silent:
        def run(self, heard) -> None: ...

    members = [Member(rank=rank, host="node0", local_rank=0) for rank in range(4)]
    lines = [Lifeline(member, Silent(), world_size=4, token=TOKEN) for member in members if member.rank != dead]
    assert [line.me.rank for line in lines if line._speaks_for(members[dead])] == [speaker]


def test_errors_of_communication():
    def chained(cause: BaseException) -> BaseException:
        try:
            try:
                raise cause
            except BaseException as error:
                raise LaunchError("lost") from error
        except LaunchError as error:
            return error

    gloo = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:7883.")
    for error in (gloo, chained(gloo), dist.DistBackendError("NCCL error"), dist.DistStoreError("wait timeout")):
        assert ending._is_of_communication(error), error
    for error in (RuntimeError("shape '[2]' is invalid"), ValueError("socket"), chained(KeyError("gloo"))):
        assert not ending._is_of_communication(error), error


def test_errors_are_told_in_one_short_line():
    assert text_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert text_of(ValueError("a\n  b")) == "ValueError: a b"
    assert len(text_of(ValueError("é" * 5000))) == 500
    assert len(json.dumps(Failure(member=MEMBERS[0], end=End.FAILED, text=text_of(ValueError("é" * 5000))).message())) < wire._MOST_BYTES


def test_what_differs_is_named_with_its_ranks():
    said = [{"the model": "A", "strategy": "'osdp'"}] * 3 + [{"the model": "B", "strategy": "'osdp'"}]
    assert mismatch_line(said) == (
        "Ranks are about to run different things: the model is A on ranks 0-2, B on rank 3."
        " Run the same program with the same arguments on every rank."
    )
    assert mismatch_line(said[:3]) is None
    assert mismatch_line([{"plan": "abc"}, {"plan": ""}]) is None, "rank 0's file is not there on rank 1"


def test_what_the_launcher_says_of_this_machine():
    assert local_rank({}) is None and local_rank({"LOCAL_RANK": "3"}) == 3
    assert one_machine(4, "node0", {"LOCAL_WORLD_SIZE": "4"}) and not one_machine(4, "127.0.0.1", {"LOCAL_WORLD_SIZE": "2"})
    assert one_machine(4, "127.0.0.1", {}) and not one_machine(4, "node0", {}) and not one_machine(4, None, {})
