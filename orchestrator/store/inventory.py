"""What a node's fresh sample leads to, in one transaction: leases over, revoked or stuck, and fresh accounts."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.gpu import Gpu, GpuProcess, Health
from orchestrator.store import endings, gpus, leases, nodes, residency
from orchestrator.store.gpus import Gate

#: A GPU that another node measured so many seconds ago is there.
MOVED_S = 15.0


@dataclass(frozen=True)
class Findings:
    """What those who sampled must know."""

    #: GPUs closed just now, because the memory of an ended lease did not come back.
    quarantined: tuple[str, ...] = ()
    #: Leases of their own warm models that must make room.
    evicted: tuple[str, ...] = ()
    #: Leases of models that they keep, and that are over, whoever ended them.
    forgotten: tuple[str, ...] = ()
    #: Processes that outlived the worker they belong to.
    orphans: tuple[GpuProcess, ...] = ()


def take_stock(
    conn: Connection,
    node_id: str,
    worker_ids: Collection[str],
    sample: Sequence[Gpu],
    gate: Gate,
    running: Collection[str],
    patience_s: float,
    *,
    resident: Collection[str] = (),
    taken_at: float | None = None,
) -> Findings:
    """Store a sample and act on it.

    `worker_ids` are the workers that one process runs, `running` their slots that lived when the sample was taken,
    `resident` the leases of the models that those keep. `taken_at` is the monotonic time before the GPUs were asked
    (None: just now). What happened between that and this transaction, however long it had to wait for others, the
    sample does not show.
    """
    sample = _still_here(conn, node_id, gpus.storable(sample))
    lost = {gpu.uuid: gpu.health_reason or "no reason given" for gpu in sample if gpu.health is Health.LOST}
    if lost:
        leases.revoke(conn, lost)
    answering = [gpu for gpu in sample if gpu.health in (Health.OK, Health.UNHEALTHY)]
    sighting = endings.Sighting(answering, worker_ids, running, taken_at)
    quarantined = endings.finish(conn, node_id, sighting, patience_s)
    gpus.record(conn, node_id, sample, gate, time.monotonic() - taken_at if taken_at else 0.0)
    evicted, forgotten = residency.evicted(conn, node_id, worker_ids, resident) if resident else ((), ())
    return Findings(tuple(quarantined), evicted, forgotten, _orphans(conn, worker_ids, sample))


def _still_here(conn: Connection, node_id: str, sample: Sequence[Gpu]) -> Sequence[Gpu]:
    """Without the GPUs that are lost here because they are another node's by now."""
    lost = [gpu.uuid for gpu in sample if gpu.health is Health.LOST]
    moved = gpus.elsewhere(conn, node_id, lost, MOVED_S) if lost else set()
    return [gpu for gpu in sample if gpu.uuid not in moved] if moved else sample


def _orphans(conn: Connection, worker_ids: Collection[str], sample: Sequence[Gpu]) -> tuple[GpuProcess, ...]:
    marked = {process for gpu in sample for process in gpu.processes or () if process.mark}
    strangers = {process.worker_id for process in marked if process.worker_id} - {*worker_ids}
    dead = nodes.dead_ids(conn, strangers) if strangers else set()
    return tuple(sorted((process for process in marked if process.worker_id in dead), key=lambda process: process.pid))
