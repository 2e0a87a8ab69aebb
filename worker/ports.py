"""Ports of this machine: one that is free at the moment, and whose it is later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"
#: State of a listening socket in the kernel's tables.
_LISTEN = "0A"


def free_port() -> int:
    """A loopback port that nobody has now. Somebody else may take it before the one it is meant for does."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def listens(pid: int, port: int) -> bool:
    """Whether this process or a descendant of it is who answers on that port, and nobody else: a port can be shared."""
    listening = set(_listening(port))
    return bool(listening) and listening <= {its for one in _family(pid) for its in _sockets(one)}


def _listening(port: int) -> Iterator[str]:
    """The sockets that listen there, as `/proc/PID/fd` names them."""
    for table in ("tcp", "tcp6"):
        for line in _lines(Path("/proc/net") / table):
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                yield f"socket:[{inode}]"


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except FileNotFoundError:
        return []  # a kernel without IPv6


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]
    except OSError:
        return  # gone meanwhile
    for child in children:
        yield from _family(child)


def _children(task: Path) -> list[int]:
    return [int(pid) for pid in (task / "children").read_text().split()]


def _sockets(pid: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            yield str(descriptor.readlink())
    except OSError:
        return  # gone meanwhile
