"""How often the same trouble is told: at once, then now and then for as long as it lasts, and when it is over."""

from __future__ import annotations

import time

#: Seconds between two warnings of the same.
WARN_EVERY_S = 60.0


class Seldom:
    """Whether it is time to say it again."""

    def __init__(self) -> None:
        self._next = float("-inf")

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + WARN_EVERY_S
        return True

    def over(self) -> bool:
        """The trouble is gone, and the next is told at once; whether this one was told, so that its end should be."""
        told = self._next != float("-inf")
        self._next = float("-inf")
        return told
