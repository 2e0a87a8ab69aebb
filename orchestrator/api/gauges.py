"""The cluster in numbers, read when somebody scrapes; names and help texts are in `metrics`.

Two readings of the database: what is small, and how much waits in the lanes, which takes longer the more that is. Both
are made in the background when they are slow, and a scrape shows the last ones (`readings`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from orchestrator.api.probes import LIMIT_S, Probe
from orchestrator.api.readings import Reading
from orchestrator.batch_sizes import BatchSizes, Sizes
from orchestrator.daemon import Orchestrator
from orchestrator.errors import Unavailable
from orchestrator.placement import GpuView
from orchestrator.pools import PoolState
from orchestrator.store import backlog, dead_letters, gpus, job_reads, leadership, pools, tallies, worker_reads
from orchestrator.store.backlog import Depth
from orchestrator.store.job_reads import PoolLiveness
from orchestrator.tallies import OTHER
from orchestrator.telemetry import metrics

#: Seconds for which Redis is not asked again.
KEEP_S = 1.0
#: Clients may name any pool: so many have labels of their own, the others share one.
MAX_LANES = 200

Values = dict[tuple[str, ...], float]


class Gauges:
    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        #: What workers had told of their batches at the last look.
        self._batches: dict[str, BatchSizes] = {}
        #: Lanes where nothing was announced at the last reading, and the job that should have been.
        self._stuck: dict[str, str] = {}
        # The first is quick: a database that lets it wait for seconds is none.
        self._cluster = Reading(self._read_cluster, hangs_s=LIMIT_S)
        self._lanes = Reading(self._read_lanes)
        self._redis = Probe(self._orchestrator.hub.ping, keep_s=KEEP_S)

    async def exposition(self) -> bytes:
        """Whatever can be known now, in Prometheus' text format; what cannot is left out."""
        asked = (self._cluster.latest(), self._lanes.latest(), self._redis.answer())
        cluster, lanes, redis = await asyncio.gather(*map(_or_away, asked))
        up: dict[str, Values] = {
            "database_up": {(): float(not isinstance(cluster, Unavailable))},
            "redis_up": {(): float(not isinstance(redis, Unavailable))},
        }
        # Of a database that is away nothing is said, also not what it counted a moment ago.
        read = [] if isinstance(cluster, Unavailable) else [cluster, lanes]
        return b"".join([metrics.own(), metrics.of_cluster(up), *[one for one in read if isinstance(one, bytes)]])

    def _read_cluster(self) -> bytes:
        db, settings = self._orchestrator.db, self._orchestrator.settings
        staffed = {pool.pool_id: pool for pool in db.read(job_reads.live_pools)}
        opened = db.read(lambda conn: pools.open_ids(conn, MAX_LANES))
        cards = db.read(lambda conn: gpus.list_gpus(conn, settings.gpu_stale_s))
        views = db.read(lambda conn: gpus.views(conn, settings.gpu_stale_s))
        term = db.read(lambda conn: leadership.current(conn, settings.leader_lock))
        self._count_batches(db.read(worker_reads.batch_sizes))
        named = labelled(staffed, opened)
        gauges: dict[str, Values] = {
            "worker_pool_workers": _workers(opened, staffed, named),
            "worker_heartbeat_age_seconds": _silence(staffed, named),
            "worker_pools_total": _by_status(db.read(pools.counts)),
            "leases_free": {(): _with_room(views)},
            "leases_active": {(): db.read(job_reads.active_leases)},
            "leader_epoch": {(): term.epoch},
            "dlq_depth": {(): db.read(dead_letters.depth)},
            "tally_lag_seconds": {(): db.read(tallies.lag_s)},
        }
        totals = metrics.of_jobs(db.read(tallies.totals))
        return metrics.of_cluster(gauges | _gpus(cards)) + metrics.of_batches() + totals

    def _count_batches(self, told: dict[str, BatchSizes]) -> None:
        """Only what is new: a worker that leaves must not make the sum smaller."""
        for worker_id, by_type in told.items():
            before = self._batches.get(worker_id, {})
            for type, sizes in by_type.items():
                metrics.batched(type, sizes.since(before.get(type, Sizes())))
        self._batches = told

    def _read_lanes(self) -> bytes:
        """An idle lane is a zero, not a gap: autoscalers scale on it."""
        db = self._orchestrator.db
        staffed = {pool.pool_id for pool in db.read(job_reads.live_pools)}
        opened = db.read(lambda conn: pools.open_ids(conn, MAX_LANES))
        known = db.read(backlog.lanes_by_age)
        named = labelled(staffed, opened, known)
        names = list(dict.fromkeys([*known, *sorted(staffed)]))
        depths = db.read(lambda conn: backlog.depths(conn, names))
        gauges = self._depths(depths, named) | {
            "oldest_pending_age_seconds": self._ages(depths, named),
            "publish_lag_seconds": {(): self._publish_lag(depths)},
        }
        return metrics.of_cluster(gauges)

    def _ages(self, depths: Mapping[str, Depth], named: Collection[str]) -> Values:
        """Lanes that share a label are looked at only where they begin."""
        due = [lane for lane, depth in depths.items() if depth.due and lane in named]
        read = self._orchestrator.db.read
        found = read(lambda conn: backlog.oldest_s(conn, due))
        deferred = {lane: depth.oldest_deferred_s for lane, depth in depths.items()}
        ages: Values = {
            self._stream(lane): max(found.get(lane, 0.0), deferred[lane]) for lane in depths if lane in named
        }
        if others := [deferred[lane] for lane in depths if lane not in named]:
            ages[(OTHER,)] = max(read(lambda conn: backlog.oldest_head_s(conn, named)), *others)
        return ages

    def _stream(self, lane: str) -> tuple[str]:
        return (self._orchestrator.hub.lane(lane).key,)

    def _depths(self, depths: Mapping[str, Depth], named: Collection[str]) -> dict[str, Values]:
        work, delayed, blocked, running = Values(), Values(), Values(), Values()
        for lane, depth in depths.items():
            pool = lane if lane in named else OTHER
            stream = self._stream(lane) if lane in named else (OTHER,)
            work[stream] = work.get(stream, 0) + depth.work
            delayed[stream] = delayed.get(stream, 0) + depth.delayed
            blocked[stream] = blocked.get(stream, 0) + depth.blocked
            running[(pool,)] = running.get((pool,), 0) + depth.owned
        return {
            "job_queue_depth": work,
            "jobs_delayed": delayed,
            "jobs_blocked": blocked,
            "jobs_in_flight": running,
        }

    def _publish_lag(self, depths: Mapping[str, Depth]) -> float:
        """The longest wait for an announcement, in open lanes where somebody listens and nothing is announced.

        Between two looks of a publisher that is so for a moment in any lane: who was stuck at the last reading counts.
        """
        db = self._orchestrator.db
        book, heard = db.read(self._orchestrator.policies.book), db.read(backlog.listening)
        quiet = [lane for lane, depth in depths.items() if depth.ready and not depth.announced]
        quiet = [lane for lane in quiet if lane in heard and not book.closed(lane)]
        stuck = db.read(lambda conn: backlog.stuck(conn, heard, quiet))
        before, self._stuck = self._stuck, {lane: one.job_id for lane, one in stuck.items()}
        return max((one.seconds for lane, one in stuck.items() if before.get(lane) == one.job_id), default=0.0)


def labelled(staffed: Iterable[str], opened: Iterable[str], known: Iterable[str] = ()) -> set[str]:
    """The lanes with labels of their own: with workers, of open pools, then the oldest. The same on every instance."""
    return set(list(dict.fromkeys([*sorted(staffed), *sorted(opened), *known]))[:MAX_LANES])


async def _or_away(asked: Any) -> Any:
    try:
        return await asked
    except Unavailable as away:
        return away


def _workers(opened: Iterable[str], staffed: Mapping[str, PoolLiveness], named: Collection[str]) -> Values:
    """A pool that should take jobs and has no worker is a zero: that is what alerts look for."""
    values = Values()
    for pool_id in {*opened, *staffed}:
        label = (pool_id if pool_id in named else OTHER,)
        values[label] = values.get(label, 0) + (staffed[pool_id].workers if pool_id in staffed else 0)
    return values


def _silence(staffed: Mapping[str, PoolLiveness], named: Collection[str]) -> Values:
    values = Values()
    for pool_id, pool in staffed.items():
        label = (pool_id if pool_id in named else OTHER,)
        values[label] = max(values.get(label, 0.0), pool.silent_s)
    return values


def _by_status(counts: Mapping[str, int]) -> Values:
    return {(state,): counts.get(state, 0) for state in PoolState}


def _with_room(views: Iterable[GpuView]) -> int:
    return sum(view.in_service and view.free_mb > 0 for view in views)


def _gpus(cards: list[dict[str, Any]]) -> dict[str, Values]:
    keyed = [((gpu["node_id"], str(gpu["gpu_index"])), gpu) for gpu in cards]
    return {
        # A stale sample says nothing about now.
        "gpu_mem_used_pct": {key: 100 * gpu["used_mb"] / gpu["total_mb"] for key, gpu in keyed if gpu["fresh"]},
        "gpu_mem_foreign_mb": {key: gpu["foreign_mb"] for key, gpu in keyed if gpu["fresh"]},
        "gpu_mem_leased_mb": {key: gpu["leased_mb"] for key, gpu in keyed},
        "gpu_quarantined": {key: int(gpu["quarantined_at"] is not None) for key, gpu in keyed},
    }
