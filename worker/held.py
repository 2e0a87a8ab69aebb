"""The jobs a worker has in hand, and the entries that brought them."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Held:
    """The jobs this worker has in hand, from the claim until their end is written down."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, job_id: str, entry_id: str) -> None:
        with self._lock:
            self._entries[job_id] = entry_id

    def drop(self, job_ids: Sequence[str]) -> None:
        with self._lock:
            for job_id in job_ids:
                self._entries.pop(job_id, None)

    def entry_of(self, job_id: str) -> str:
        return self._entries.get(job_id, "")

    def job_ids(self) -> set[str]:
        with self._lock:
            return set(self._entries)

    def entry_ids(self) -> set[str]:
        with self._lock:
            return set(self._entries.values())
