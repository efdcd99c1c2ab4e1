"""The two ends of the lifeline: rank 0 knows all the others, they know rank 0."""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .rank_reports import died_line, failed_line, off_line
from .wire import Connection, Ended

_HELLO_S = 5.0
"""For whoever connects to say who it is."""
_MOST_STRANGERS = 256
"""Connections that have not said so yet, beside those of a line's ranks."""
_PAUSE_S = 0.1
"""After one that could not be accepted, such as for want of file descriptors: it is still waiting."""


class End(Enum):
    """How a rank ended."""

    FAILED = "failed"
    DIED = "died"
    OFF = "off"
    AGAIN = "again"
    """It ran out of memory, and all start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank on the line."""

    rank: int
    host: str
    local_rank: int | None
    """Its number on its machine; None where the launcher does not say."""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or type(self.host) is not str or type(self.local_rank) not in (int, type(None)):
            raise ValueError(f"rank={self.rank!r}, host={self.host!r}, local_rank={self.local_rank!r} is no member of a lifeline.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ends all."""

    member: Member
    end: End
    text: str = ""
    """What the rank said, or the system of rank 0's machine; of a new start the memory limit, and from rank 0 the variables."""

    @property
    def line(self) -> str:
        """For the user."""
        match self.end:
            case End.FAILED:
                return failed_line(self.member.rank, self.member.host, text=self.text)
            case End.DIED:
                return died_line(self.member.rank, self.member.host)
            case End.OFF:
                return off_line(self.member.rank, self.member.host, reason=self.text)
            case End.AGAIN:
                return f"Rank {self.member.rank} on {self.member.host} ran out of device memory, and all ranks start again by a safer plan."

    def message(self) -> dict[str, object]:
        """For the wire."""
        return {"kind": "failure", "member": asdict(self.member), "end": self.end.value, "text": self.text}


Heard = Callable[[Failure], None]


class Hub:
    """Rank 0's end: one thread reads from all, and passes on what ends all."""

    def __init__(self, me: Member, world_size: int, listener: socket.socket, host: str, token: str) -> None:
        """
        Args:
            me: rank 0.
            world_size: ranks on the line.
            listener: where others connect.
            host: its address as they reach it.
            token: what they have to know.
        """
        self._me, self._world_size, self._listener, self.host, self._token = me, world_size, listener, host, token
        self._members: dict[Connection, Member] = {}
        self._strangers: dict[Connection, float] = {}
        self._complete = threading.Event()
        self.over = False
        """Rank 0 has left."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self, heard: Heard) -> None:
        """Read until this rank leaves."""
        while not self.over:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fileobj, heard)
            for late in [one for one, deadline in self._strangers.items() if time.monotonic() > deadline]:
                self._forget(late)
        self.close()

    def missing(self, seconds: float) -> list[int]:
        """Wait for all to be on the line. Returns the ranks that are not."""
        self._complete.wait(seconds)
        here = {member.rank for member in list(self._members.values())}
        return [rank for rank in range(1, self._world_size) if rank not in here]

    def send(self, message: dict[str, object]) -> None:
        """To all."""
        for connection in list(self._members):
            connection.send(message)

    def close(self) -> None:
        """Close this process's sockets, and say nothing."""
        for connection in (*self._members, *self._strangers):
            connection.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection = Connection(self._listener.accept()[0])
        except OSError:  # out of file descriptors, or it is gone already
            time.sleep(_PAUSE_S)
            return
        if len(self._strangers) >= _MOST_STRANGERS + self._world_size:
            connection.close()
            return
        connection.wait_at_most(_HELLO_S)
        self._strangers[connection] = time.monotonic() + _HELLO_S
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: Connection, heard: Heard) -> None:
        try:
            for message in connection.receive():
                if connection in self._members:
                    self._hear(connection, message, heard)
                elif connection in self._strangers:
                    self._welcome(connection, message)
        except Ended as ended:
            member = self._forget(connection)
            if member is not None:
                heard(_loss(member, str(ended)))

    def _welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Take a rank in, if it is one.

        Raises:
            Ended: it is not.
        """
        if not hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode()):
            raise Ended("it is a stranger")
        try:
            member = Member(**hello["member"])
        except (KeyError, TypeError, ValueError) as error:
            raise Ended("it sent something else") from error
        del self._strangers[connection]
        connection.send({"kind": "welcome", "member": asdict(self._me)})
        self._members[connection] = member
        if not self.missing(0.0):
            self._complete.set()

    def _hear(self, connection: Connection, message: dict[str, Any], heard: Heard) -> None:
        match message.get("kind"):
            case "bye":
                self._forget(connection)
            case "failure":
                heard(_said(message, self._members[connection]))

    def _forget(self, connection: Connection) -> Member | None:
        """Close a connection. Returns whose it was, if it was a rank's."""
        self._strangers.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()
        return self._members.pop(connection, None)


class Spoke:
    """The end of every other rank: rank 0 ends, or tells who did."""

    def __init__(self, connection: Connection, me: Member, token: str) -> None:
        """Say who this is, and hear who answers.

        Args:
            connection: to rank 0.
            me: this rank.
            token: what rank 0 knows, too.

        Raises:
            OSError: whoever answers is not rank 0.
        """
        self._connection, self._waiting = connection, []
        self.told = threading.Event()
        """Rank 0 has said what there was to say, or is gone."""
        connection.wait_at_most(_HELLO_S)
        connection.send({"kind": "hello", "token": token, "member": asdict(me)})
        try:
            welcome, *self._waiting = connection.receive()
            self._hub = Member(**welcome["member"])
        except (Ended, KeyError, TypeError, ValueError) as error:
            connection.close()
            raise OSError(f"it is not rank 0 that answers: {error}") from error
        connection.wait_at_most(None)

    def run(self, heard: Heard) -> None:
        """Read until rank 0 leaves."""
        try:
            messages = self._waiting
            while True:
                for message in messages:
                    match message.get("kind"):
                        case "bye":
                            return
                        case "told":
                            self.told.set()
                        case "failure":
                            heard(_said(message, None))
                messages = self._connection.receive()
        except Ended as ended:
            heard(_loss(self._hub, str(ended)))
        finally:
            self.told.set()

    def send(self, message: dict[str, object]) -> None:
        """To rank 0."""
        self._connection.send(message)

    def close(self) -> None:
        """Close this process's socket, and say nothing."""
        self._connection.close()


def _said(message: dict[str, Any], sender: Member | None) -> Failure:
    """A failure from the wire; what a rank says, it says of itself.

    Raises:
        Ended: it is something else.
    """
    try:
        member = sender or Member(**message["member"])
        if sender is not None and message["end"] == End.AGAIN.value and not str(message["text"]).isdecimal():
            raise ValueError("no limit")
        return Failure(member=member, end=End(message["end"]), text=str(message["text"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Ended("it sent something else") from error


def _loss(member: Member, reason: str) -> Failure:
    """A rank that left without goodbye: its process ended, or nothing is heard of its machine."""
    return Failure(member=member, end=End.OFF if reason else End.DIED, text=reason)
