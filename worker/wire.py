"""Frames between supervisor and slot: a JSON head, and a body that neither side needs to parse.

The body is the payload on the way in and the result on the way out, as JSON text that goes to and from the
database unchanged. A small job is one system call each way, and little else: a process that wakes for it finds the
processor's caches cold, and every function costs several times what it does in a loop.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

#: Bytes of one frame at most. Text in place of its length, which a handler may have written there, is always more.
MAX_FRAME = 2**30
#: Bytes that one read asks for. Nearly every frame is smaller.
READ_BYTES = 65_536

_PR_SET_PDEATHSIG = 1
_SIZE = struct.Struct("!I")

#: Asks a slot to stop its job: sets `ctx.cancelled`, nothing more.
CANCEL = signal.SIGUSR1

Frame = tuple[dict[str, Any], str]


class Channel:
    """One end. May be written by several threads while another reads it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._unread = bytearray()
        self._half_since: float | None = None

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def limit_sending(self, seconds: int) -> None:
        """The other end may be frozen while its buffer is full: then `send` raises after so many seconds.

        Twice as many where a part of the frame found room: the kernel counts anew for the rest.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def send(self, head: dict[str, Any], body: str = "") -> None:
        """Raises OSError when the other side is gone, or does not read."""
        text = f"{json.dumps(head)}\n{body}".encode()
        with self._sending:
            self._socket.sendall(_SIZE.pack(len(text)) + text)

    def receive(self) -> Frame:
        """Wait for the next frame. Raises EOFError when the other side is gone, ValueError for what is no frame."""
        while (frame := self._next()) is None:
            self._read_some()
        return frame

    def receive_now(self) -> list[Frame]:
        """What is there, without waiting for the rest of a frame: the other end may be frozen in the middle of it."""
        self._read_some(socket.MSG_DONTWAIT)
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        self._half_since = time.monotonic() if self._unread else None
        return frames

    def is_stuck(self, now: float, limit_s: float) -> bool:
        """Whether nothing has followed the beginning of a frame for so long."""
        return self._half_since is not None and now - self._half_since > limit_s

    @property
    def is_readable(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True  # its end, too

    def _read_some(self, flags: int = 0) -> None:
        some = self._socket.recv(READ_BYTES, flags)
        if not some:
            raise EOFError
        self._unread += some

    def _next(self) -> Frame | None:
        if len(self._unread) < _SIZE.size:
            return None
        (size,) = _SIZE.unpack_from(self._unread)
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes")
        end = _SIZE.size + size
        if len(self._unread) < end:
            return None
        head, _, body = self._unread[_SIZE.size : end].decode().partition("\n")
        del self._unread[:end]
        return json.loads(head), body


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, and check that it has not yet."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
