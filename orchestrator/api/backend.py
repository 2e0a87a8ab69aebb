"""What handlers work with: the orchestrator, behind calls that never block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Annotated, Any, TypeAlias, TypeVar

from fastapi import Depends, Request

from orchestrator.api.gauges import Gauges
from orchestrator.api.probes import Probe, Probes
from orchestrator.api.teller import Teller
from orchestrator.api.waiters import Waiters
from orchestrator.daemon import Orchestrator
from orchestrator.errors import DatabaseUnavailable, OrchestratorError
from orchestrator.jobs import NewJob
from orchestrator.leases import Denied, Granted, LeaseRequest
from orchestrator.store import dispatch, job_reads, leases
from orchestrator.store.claim import Claim
from orchestrator.store.database import Database
from orchestrator.store.dead_letters import Removed
from orchestrator.store.dispatch import Fetch
from orchestrator.store.registry import Told
from orchestrator.store.reports import Ended, Heard, Report, Sign
from orchestrator.store.settle import End
from orchestrator.store.submit import MAX_RUNS, Answer, MetOthers, Rules

T = TypeVar("T")
#: (connection, database, rules) → what was stored.
Entry: TypeAlias = Callable[[Any, Database, Rules], T]

#: Seconds for which statistics are good enough, however many ask.
STATS_S = 1.0


class Backend:
    """One per app. Every call ends within `db_timeout_s`, also when the database is frozen."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.settings = orchestrator.settings
        self.waiters = Waiters(self._ended)
        self.openings = Waiters(self._openings)
        self.gauges = Gauges(orchestrator)
        self.probes = Probes(orchestrator)
        self.stats = Probe(lambda: orchestrator.db.read(job_reads.stats), keep_s=STATS_S)
        self.teller = Teller(orchestrator.hub)
        # More threads than connections would only wait for connections.
        self._threads = ThreadPoolExecutor(self.settings.db_pool_size, thread_name_prefix="api-db")

    async def read(self, work: Callable[[Any], T]) -> T:
        return await self._in_thread(lambda: self.orchestrator.db.read(work))

    async def write(self, work: Callable[[Any], T]) -> T:
        return await self._in_thread(lambda: self.orchestrator.db.write(work))

    async def submit(self, jobs: Sequence[NewJob]) -> list[Answer]:
        future = self.orchestrator.submit(jobs)
        # What was refused at once, under a flood, need not wake the loop to say so.
        return future.result() if future.done() else await self._limited(asyncio.wrap_future(future))

    async def enter(self, work: Entry[T]) -> T:
        """As every submit, but in one transaction with whatever else `work` writes: all or none."""
        orchestrator = self.orchestrator
        ruling = orchestrator.admission.ruling()
        rules = Rules(orchestrator.retry_policy, ruling.decide, orchestrator.policies.book)
        for run in range(1, MAX_RUNS + 1):
            try:
                answer = await self.write(lambda conn: work(conn, orchestrator.db, rules))
            except MetOthers:  # rolled back; the next run finds what they inserted
                if run == MAX_RUNS:
                    raise
            except OrchestratorError:
                ruling.rolled_back()
                raise
            else:
                if answer:
                    ruling.committed()
                return answer
        raise AssertionError  # the last run returns or raises

    async def lease(self, request: LeaseRequest) -> Granted | Denied:
        future = self.orchestrator.lease(request)
        try:
            # Shielded: what waits in the batcher may be granted although its caller has gone.
            answer = await self._limited(asyncio.shield(asyncio.wrap_future(future)))
        except BaseException:
            future.add_done_callback(self._give_back)
            raise
        if isinstance(answer, Denied) and answer.evicting:
            self.teller.ring()  # workers hear which of their warm models must leave
        return answer

    async def claim(self, fetch: Fetch) -> list[Claim]:
        future = self.orchestrator.remote.claim(fetch)
        try:
            # Shielded, as above: these jobs must not stay with a worker that never hears of them.
            return await self._limited(asyncio.shield(asyncio.wrap_future(future)))
        except BaseException:
            future.add_done_callback(lambda late: self._unclaim(fetch, late))
            raise

    def _unclaim(self, fetch: Fetch, late: Future[list[Claim]]) -> None:
        if not late.cancelled() and not late.exception():
            self.orchestrator.remote.hand_back(fetch.worker_id, late.result())

    async def lease_heartbeat(self, token: str) -> datetime:
        return await self._limited(asyncio.wrap_future(self.orchestrator.heartbeats.of_lease(token)))

    async def worker_heartbeat(self, told: Told) -> None:
        await self._limited(asyncio.wrap_future(self.orchestrator.heartbeats.of_worker(told)))

    async def report(self, worker_id: str, event: End | Sign) -> Ended | Heard:
        return await self._limited(asyncio.wrap_future(self.orchestrator.remote.report(Report(worker_id, event))))

    def _give_back(self, late: Future[Granted | Denied]) -> None:
        """Nobody got this answer: its memory must not stay taken until the lease ends by itself."""
        answer = None if late.cancelled() or late.exception() else late.result()
        if isinstance(answer, Granted):
            self._threads.submit(self.orchestrator.db.write, lambda conn: leases.release(conn, answer.request.token))

    def left_the_dead(self, removed: Removed) -> None:
        """Jobs were started over or forgotten: their lanes have work perhaps, the dead-letter stream less to tell."""
        for lane in removed.lanes:
            self.orchestrator.publisher.nudge(lane)
        self.teller.take_back_letters(removed.entry_ids)

    def pools_changed(self, which: str, *, ring: bool = False) -> None:
        """The leader looks at the pools now, be it here or elsewhere; with `ring`, so do all supervisors."""
        self.orchestrator.leader.hurry("reconcile")
        self.teller.ask_for_pools(which)
        if ring:
            self.teller.ring()

    def policies_changed(self) -> None:
        """Decisions here follow it at once, those of other instances when their copies are old; workers are rung."""
        self.orchestrator.policies.expire()
        self.orchestrator.leader.hurry("caps")  # who waits for a cap that is gone goes
        self.teller.ring()

    def stop_waiting(self) -> None:
        self.waiters.close()
        self.openings.close()

    def close(self) -> None:
        self.stop_waiting()
        self.teller.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ended(self, job_ids: list[str]) -> set[str]:
        return await self.read(lambda conn: job_reads.terminal_among(conn, job_ids))

    async def _openings(self, worker_ids: list[str]) -> set[str]:
        policies = self.orchestrator.policies
        return await self.read(lambda conn: dispatch.openings(conn, worker_ids, policies.book(conn)))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        context = contextvars.copy_context()  # who asks; an executor's threads would not know
        return await self._limited(asyncio.get_running_loop().run_in_executor(self._threads, context.run, call))

    async def _limited(self, answer: Awaitable[T]) -> T:
        limit = self.settings.db_timeout_s
        try:
            async with asyncio.timeout(limit):  # not wait_for, which takes a turn of the loop more
                return await answer
        except TimeoutError:
            raise DatabaseUnavailable(f"no answer within {limit:g} seconds") from None


async def _backend(request: Request) -> Backend:  # a coroutine: the framework runs plain functions in threads
    backend: Backend = request.app.state.backend
    return backend


Api = Annotated[Backend, Depends(_backend)]
