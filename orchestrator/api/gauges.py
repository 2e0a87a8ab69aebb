"""The cluster in numbers, read when somebody scrapes; names and help texts are in `metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.api.probes import Probe
from orchestrator.daemon import Orchestrator
from orchestrator.errors import Unavailable
from orchestrator.placement import GpuView
from orchestrator.pools import PoolState
from orchestrator.store import dead_letters, gpus, job_reads, leadership, nodes, outbox, pools
from orchestrator.store.job_reads import LaneDepth, PoolLiveness
from orchestrator.tally import Sizes, Tally
from orchestrator.telemetry import metrics
from orchestrator.telemetry.metrics import Readings

#: Seconds for which a reading is good enough, however often somebody scrapes.
KEEP_S = 1.0
#: Clients may name any pool. Beyond this many, pools without workers share one label.
MAX_LANES = 200
OTHER = "other"

Values = dict[tuple[str, ...], float]


class Gauges:
    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._named: set[str] = set()
        #: What workers had told of their batches at the last look.
        self._batches: dict[str, Tally] = {}
        self._database = Probe(self._read_database, keep_s=KEEP_S)
        self._redis = Probe(self._read_redis, keep_s=KEEP_S)

    async def read(self) -> Readings:
        """Whatever can be known now; what cannot is left out."""
        return await _or_down(self._database, "database_up") | await _or_down(self._redis, "redis_up")

    def _read_redis(self) -> dict[str, Values]:
        self._orchestrator.hub.ping()
        return {}

    def _read_database(self) -> dict[str, Values]:
        db, settings = self._orchestrator.db, self._orchestrator.settings
        staffed = db.read(job_reads.live_pools)
        cards = db.read(lambda conn: gpus.list_gpus(conn, settings.gpu_stale_s))
        views = db.read(lambda conn: gpus.views(conn, settings.gpu_stale_s))
        term = db.read(lambda conn: leadership.current(conn, settings.leader_lock))
        self._count_batches(db.read(nodes.batch_sizes))
        return (
            self._lanes(db.read(outbox.known_lanes), db.read(job_reads.depths), staffed)
            | {"worker_pool_workers": self._workers(db.read(lambda conn: pools.open_ids(conn, MAX_LANES)), staffed)}
            | {"worker_pools_total": _by_status(db.read(pools.counts))}
            | _gpus(cards)
            | {"leases_free": {(): _with_room(views)}}
            | {"leases_active": {(): db.read(job_reads.active_leases)}, "leader_epoch": {(): term.epoch}}
            | {"dlq_depth": {(): db.read(dead_letters.count)}}
        )

    def _count_batches(self, told: dict[str, Tally]) -> None:
        """Only what is new: a worker that leaves must not make the sum smaller."""
        for worker_id, tally in told.items():
            before = self._batches.get(worker_id, {})
            for type, sizes in tally.items():
                metrics.batched(type, sizes.since(before.get(type, Sizes())))
        self._batches = told

    def _lanes(
        self, known: Iterable[str], depths: Iterable[LaneDepth], live: Iterable[PoolLiveness]
    ) -> dict[str, Values]:
        """An idle lane is a zero, not a gap: autoscalers scale on it."""
        staffed = {pool.pool_id: pool for pool in live}
        depth = {lane.lane: lane for lane in depths}
        waiting, age, running = Values(), Values(), Values()
        for lane in {*known, *depth, *staffed}:
            found = depth.get(lane, LaneDepth(lane, 0, 0, 0.0))
            pool = self._label(lane, staffed=lane in staffed)
            stream = (OTHER if pool == OTHER else self._orchestrator.hub.lane(lane).key,)
            waiting[stream] = waiting.get(stream, 0) + found.pending
            age[stream] = max(age.get(stream, 0.0), found.oldest_s)
            running[(pool,)] = running.get((pool,), 0) + found.running
        return {
            "job_queue_depth": waiting,
            "oldest_pending_age_seconds": age,
            "jobs_in_flight": running,
            "worker_heartbeat_age_seconds": {(pool_id,): pool.silent_s for pool_id, pool in staffed.items()},
        }

    def _workers(self, pool_ids: Iterable[str], live: Iterable[PoolLiveness]) -> Values:
        """A pool that should take jobs and has no worker is a zero: that is what alerts look for."""
        without: Values = {(self._label(pool_id, staffed=False),): 0.0 for pool_id in pool_ids}
        return without | {(pool.pool_id,): pool.workers for pool in live}

    def _label(self, lane: str, *, staffed: bool) -> str:
        """Its own name for a lane with workers; for others while there is room, first come, first served."""
        if not staffed and len(self._named) < MAX_LANES:
            self._named.add(lane)
        return lane if staffed or lane in self._named else OTHER


async def _or_down(probe: Probe[dict[str, Values]], up: str) -> dict[str, Values]:
    try:
        return await probe.answer() | {up: {(): 1.0}}
    except Unavailable:
        return {up: {(): 0.0}}


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
