"""How processes and machines are called, and what has no name yet."""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every slot loads this module, and does without the settings
    from orchestrator.settings import Settings

#: What the process of a worker calls itself, as `ps` shows it, once it can be told by a signal to drain.
WORKER_PROCESS = "gpuorch-worker"
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


def fresh_id(kind: str) -> str:
    """One that sorts by time, so that rows of neighbours land on neighbouring pages."""
    return f"{kind}-{time.time_ns() // 1_000_000:012x}-{os.urandom(8).hex()}"
