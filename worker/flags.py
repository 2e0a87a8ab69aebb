"""Which jobs of a batch were cancelled, where their slot can read it: one byte each.

Memory, because a signal has no number, and a pipe that the handler does not read would fill up and hold up whoever
writes.
"""

from __future__ import annotations

import os

from orchestrator.batching import MAX_BATCH
from worker import shared


class Flags:
    """Bytes that the supervisor writes and one slot reads."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd, self._memory = shared.memory("cancelled", MAX_BATCH, fd)

    def put_up(self, place: int) -> None:
        self._memory[place] = 1

    def is_up(self, place: int) -> bool:
        return self._memory[place] == 1

    def take_down(self) -> None:
        """All of them: another batch begins."""
        self._memory[:] = bytes(MAX_BATCH)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)
