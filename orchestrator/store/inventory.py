"""What a node's fresh sample leads to, in one transaction: leases over, revoked or stuck, and fresh accounts."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.gpu import Gpu, GpuProcess, Health
from orchestrator.store import gpus, leases, nodes, residency
from orchestrator.store.gpus import Gate
from orchestrator.store.nodes import Worker


@dataclass(frozen=True)
class Findings:
    """What the worker that sampled must know."""

    #: GPUs closed just now, because the memory of an ended lease did not come back.
    quarantined: tuple[str, ...] = ()
    #: Leases of its own warm models that must make room.
    evicted: tuple[str, ...] = ()
    #: Processes that outlived the worker they belong to.
    orphans: tuple[GpuProcess, ...] = ()


def take_stock(
    conn: Connection,
    worker: Worker,
    sample: Sequence[Gpu],
    gate: Gate,
    running: Collection[str],
    patience_s: float,
    *,
    resident: bool = True,
    taken_at: float | None = None,
) -> Findings:
    """Store a sample and act on it. `running` are the worker's own slots; `resident` whether any keeps a model.

    `taken_at` is the monotonic time before the GPUs were asked (None: just now). What happened between that and this
    transaction, however long it had to wait for others, the sample does not show.
    """
    lost = {gpu.uuid: gpu.health_reason or "no reason given" for gpu in sample if gpu.health is Health.LOST}
    if lost:
        leases.revoke(conn, lost)
    answering = [gpu for gpu in sample if gpu.health in (Health.OK, Health.UNHEALTHY)]
    quarantined = leases.finish_endings(conn, worker, answering, running, patience_s, taken_at)
    gpus.record(conn, worker.node_id, sample, gate, time.monotonic() - taken_at if taken_at else 0.0)
    evicted = residency.evicted(conn, worker.worker_id, worker.node_id) if resident else []
    return Findings(tuple(quarantined), tuple(evicted), _orphans(conn, worker, sample))


def _orphans(conn: Connection, worker: Worker, sample: Sequence[Gpu]) -> tuple[GpuProcess, ...]:
    marked = {process for gpu in sample for process in gpu.processes or () if process.mark}
    strangers = {process.worker_id for process in marked if process.worker_id} - {worker.worker_id}
    dead = nodes.dead_ids(conn, strangers) if strangers else set()
    return tuple(sorted((process for process in marked if process.worker_id in dead), key=lambda process: process.pid))
