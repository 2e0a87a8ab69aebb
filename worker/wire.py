"""Frames between supervisor and slot: a JSON head, and a body that neither side needs to parse.

The body is the payload on the way in and the result on the way out, as JSON text that goes to and from the
database unchanged.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1

#: Asks a slot to stop its job: sets `ctx.cancelled`, nothing more.
CANCEL = signal.SIGUSR1


def send(pipe: Connection, head: dict[str, Any], body: str = "") -> None:
    pipe.send_bytes(f"{json.dumps(head)}\n{body}".encode())


def receive(pipe: Connection) -> tuple[dict[str, Any], str]:
    """Raises EOFError when the other side is gone."""
    head, _, body = pipe.recv_bytes().decode().partition("\n")
    return json.loads(head), body


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, and check that it has not yet."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
