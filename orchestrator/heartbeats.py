"""Heartbeats that come over HTTP, of clients' leases and of workers: many of them, each kind a group commit of its own.

A row that somebody holds is passed over, and what it is about tried again, apart from the others, for as long as its
caller waits. Only one of those, now and then, queues for its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from orchestrator.leases import token_hash
from orchestrator.store import registry, renewals
from orchestrator.store.batcher import Batcher, Later
from orchestrator.store.database import Database, RowsHeld, Waiting
from orchestrator.store.registry import Told

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Seconds until a heartbeat is tried again whose row somebody held: others hold theirs until they commit.
RETRY_S = 0.05
#: One goes on while the other waits in the queue of a row, for a second at most.
FLUSHERS = 2

Said = TypeVar("Said")
Answer = TypeVar("Answer")


class _Beat(NamedTuple, Generic[Said]):
    said: Said
    #: Monotonic time: nobody waits for the answer after that.
    until: float


class Heartbeats:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._leases: Batcher[_Beat[str], datetime] = Batcher(
            "lease-heartbeats", self._extend, apart=self._extend, flushers=FLUSHERS
        )
        self._workers: Batcher[_Beat[Told], None] = Batcher(
            "worker-heartbeats", self._hear, apart=self._hear, flushers=FLUSHERS
        )

    def of_lease(self, token: str) -> Future[datetime]:
        """Until when it lives now; or LeaseNotFound, LeaseEnded, DatabaseUnavailable."""
        return self._leases.submit(self._beat(token_hash(token)))

    def of_worker(self, told: Told) -> Future[None]:
        """Or WorkerNotFound, WorkerLost, DatabaseUnavailable."""
        return self._workers.submit(self._beat(told))

    def close(self, timeout_s: float) -> None:
        self._leases.close(timeout_s)
        self._workers.close(timeout_s)

    def _beat(self, said: Said) -> _Beat[Said]:
        return _Beat(said, time.monotonic() + self._db.settings.db_timeout_s)

    def _extend(self, beats: list[_Beat[str]], waiting: Waiting = Waiting.ONCE) -> list[datetime | Later | Exception]:
        return self._write(beats, waiting, renewals.renew)

    def _hear(self, beats: list[_Beat[Told]], waiting: Waiting = Waiting.ONCE) -> list[Later | Exception | None]:
        return self._write(beats, waiting, registry.heartbeats)

    def _write(
        self,
        beats: Sequence[_Beat[Said]],
        waiting: Waiting,
        work: Callable[..., Sequence[Answer | Exception]],
    ) -> list[Answer | Later | Exception]:
        def together(conn: Connection) -> Sequence[Answer | Exception]:
            return work(conn, [beat.said for beat in beats], in_turn=waiting is Waiting.BRIEFLY)

        answers, now = self._db.write_batch(together, waiting), time.monotonic()
        return [
            Later(RETRY_S) if isinstance(answer, RowsHeld) and now < beat.until else answer
            for beat, answer in zip(beats, answers, strict=True)
        ]
