"""Questions about the servers behind us, asked with a time limit and one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from orchestrator.daemon import Orchestrator
from orchestrator.errors import DatabaseUnavailable, Unavailable
from orchestrator.store import job_reads, leadership, outbox, worker_reads
from orchestrator.store.leadership import Leadership

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds a probe may take: less than Prometheus and Kubernetes wait, whatever the servers' own limits are.
LIMIT_S = 3.0
#: Seconds for which a look at all that is owned is good enough, however many ask.
KEEP_S = 1.0


class Probe(Generic[T]):
    """A blocking question. Who asks while it is asked shares the answer: a frozen server holds one thread."""

    def __init__(self, ask: Callable[[], T], *, keep_s: float = 0.0, limit_s: float = LIMIT_S) -> None:
        self._ask = ask
        self._keep_s = keep_s
        self._limit_s = limit_s
        self._asking: asyncio.Task[T] | None = None
        self._known: tuple[float, T] | None = None

    async def answer(self) -> T:
        """Raises Unavailable, also when the answer takes too long."""
        if self._known is not None and time.monotonic() < self._known[0]:
            return self._known[1]
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._refresh())
            # A failure that comes when nobody waits any more is nobody's.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.wait_for(asyncio.shield(self._asking), self._limit_s)
        except TimeoutError:
            raise Unavailable(f"no answer within {self._limit_s:g} seconds") from None

    async def _refresh(self) -> T:
        started = time.monotonic()
        try:
            answer = await asyncio.to_thread(self._ask)
        except Unavailable:
            raise
        except Exception as broken:
            # Whatever it is, a probe must answer: that is when it is needed.
            log.warning("probe failed", exc_info=True)
            raise Unavailable(f"it answers, but not as it should: {_first_line(broken)}") from None
        now = time.monotonic()
        if self._keep_s:
            # What took long is kept longer: nobody's curiosity may cost more than a tenth of a connection.
            self._known = now + max(self._keep_s, 10 * (now - started)), answer
        return answer


class Probes:
    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self.database = Probe(self._database)
        self.redis = Probe(self._redis)
        self.workers = Probe(lambda: orchestrator.db.read(job_reads.live_pools))
        self.stale_jobs = Probe(self._stale_jobs, keep_s=KEEP_S)

    def _database(self) -> Leadership:
        """Who leads; that needs a database that answers, takes writes and has our tables."""
        db, name = self._orchestrator.db, self._orchestrator.settings.leader_lock
        db.ping()
        try:
            # No job has this id. A server that only reads, as after a failover, refuses even to look for it here.
            db.write(lambda conn: outbox.unpublish(conn, [""]))
            return db.read(lambda conn: leadership.current(conn, name))
        except Unavailable:
            raise
        except Exception as missing:  # noqa: BLE001 - it just answered a ping, so it must be the tables
            hint = "its tables cannot be read; run `gpuorch migrate`"
            raise DatabaseUnavailable(f"{hint} ({_first_line(missing)})") from None

    def _stale_jobs(self) -> int:
        timeout_s = self._orchestrator.settings.worker_timeout_s
        return self._orchestrator.db.read(lambda conn: worker_reads.stale_jobs(conn, timeout_s))

    def _redis(self) -> list[str]:
        """What is wrong with a Redis that answers."""
        self._orchestrator.hub.ping()
        return self._orchestrator.hub.warnings()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
