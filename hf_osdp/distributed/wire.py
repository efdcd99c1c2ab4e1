"""Small messages between ranks over TCP, one line of JSON each: what the lifeline speaks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

_MOST_BYTES = 8192
"""Of one line; a longer one is not ours."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that is off, or a network that is cut, is known after 10 + 3 * 5 s of silence (Linux)."""
_CONNECT_S = 5.0
"""For one attempt to reach one address."""


class Ended(Exception):
    """The other side is gone. Its text is what the system says; empty where the connection was closed, as it is when a process ends."""


class Connection:
    """One end of a connection. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        """
        Args:
            sock: connected.
        """
        self._socket = sock
        self._rest = b""
        self._sending = threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, object]) -> None:
        """Send one message. To whoever is gone it is lost; that he is, the reader finds out."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes; the messages that are complete with them.

        Raises:
            Ended: no more will come.
        """
        try:
            got = self._socket.recv(_MOST_BYTES)
        except (ConnectionResetError, BrokenPipeError) as error:  # a process that died with unread bytes
            raise Ended from error
        except OSError as error:
            raise Ended(error.strerror or str(error)) from error
        if not got:
            raise Ended
        *lines, self._rest = (self._rest + got).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise Ended("it sent something else")
        return [_message(line) for line in lines]

    def wait_at_most(self, seconds: float | None) -> None:
        """How long sending and receiving may take; None is for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close this process's end."""
        self._socket.close()


def listen(facing: str | None, *, one_machine: bool) -> tuple[socket.socket, list[str]]:
    """Open a port that the system picks.

    Args:
        facing: an address of this machine, or one that is reached through the same interface: the launcher's.
        one_machine: nobody else than this machine is to connect.

    Returns:
        The listening socket, and addresses to reach it by. It is bound to the loopback interface, to the interface that faces the
        launcher's address, or, where this machine knows that only as its loopback, to all.

    Raises:
        OSError: there is no port to be had.
    """
    if one_machine:
        return socket.create_server(("127.0.0.1", 0)), ["127.0.0.1"]
    own = _own_address(facing)
    if own is not None:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, 0), family=family, backlog=1024), [own]
    hosts = [socket.gethostname()]
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024), hosts
    return socket.create_server(("", 0), backlog=1024), hosts


def connect(hosts: Sequence[str], port: int) -> Connection:
    """Connect to the first of the addresses that answers.

    Raises:
        OSError: none does.
    """
    refused: OSError | None = None
    for host in dict.fromkeys(hosts):
        try:
            return Connection(socket.create_connection((host, port), timeout=_CONNECT_S))
        except OSError as error:
            refused = error
    raise refused or OSError("no address is known")


def _own_address(facing: str | None) -> str | None:
    """This machine's address on the interface towards another; None where that is the loopback, or cannot be said."""
    if not facing:
        return None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(facing, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only picks a route
            own = probe.getsockname()[0]
    except OSError:
        return None
    return None if ip_address(own.split("%")[0]).is_loopback else own


def _message(line: bytes) -> dict[str, Any]:
    """One line's content.

    Raises:
        Ended: it is not a message.
    """
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Ended("it sent something else") from error
    if not isinstance(said, dict):
        raise Ended("it sent something else")
    return said
