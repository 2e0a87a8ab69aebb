"""Who still fits, as far as somebody has looked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.policies import Book

UNLIMITED = 2**31 - 1


@dataclass
class Room:
    """Who is seated where, as far as somebody has looked, and has given out since."""

    book: Book
    in_use: dict[str, int] = field(default_factory=dict)

    def full(self, capped: Mapping[str, int]) -> str | None:
        """The key that keeps a job out; of several the one with the fewest seats, which is free least often."""
        return min(((most, key) for key, most in capped.items() if self._left(key, most) <= 0), default=(0, None))[1]

    def left(self, key: str) -> int:
        most = self.book.cap(key)
        return UNLIMITED if most is None else max(0, self._left(key, most))

    def take(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.in_use[key] = self.in_use.get(key, 0) + 1

    def why(self, key: str) -> str:
        return self.book.why_full(key, self.in_use.get(key, 0))

    def copy(self) -> Room:
        return Room(self.book, dict(self.in_use))

    def _left(self, key: str, most: int) -> int:
        return most - self.in_use.get(key, 0)
