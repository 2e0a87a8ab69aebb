"""How processes and machines are called."""

from __future__ import annotations

import os
import secrets
import socket

from orchestrator.settings import Settings


def instance_id() -> str:
    """host:pid:nonce. The nonce keeps a restarted process from being taken for its predecessor."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def node_id(settings: Settings) -> str:
    """The machine this process runs on, as the inventory knows it."""
    return settings.node_id or socket.gethostname()
