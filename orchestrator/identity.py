"""How processes and machines are called."""

from __future__ import annotations

import os
import secrets
import socket

from orchestrator.settings import Settings

#: Characters of a host's name in an id, so that the id stays a name.
MAX_HOST = 100


def instance_id() -> str:
    """host:pid:nonce. The nonce keeps a restarted process from being taken for its predecessor."""
    return process_id(socket.gethostname(), os.getpid())


def process_id(host: str, pid: int) -> str:
    """The same for a process elsewhere."""
    return f"{host[:MAX_HOST]}:{pid}:{secrets.token_hex(4)}"


def node_id(settings: Settings) -> str:
    """The machine this process runs on, as the inventory knows it."""
    return settings.node_id or socket.gethostname()
