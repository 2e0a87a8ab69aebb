"""Warm models: leases that outlive their jobs, wait for the next one of their type, and leave when others need room.

A job ends and leaves its model in memory → its lease becomes resident (`keep`). The next job of that type on that slot
runs under it (`occupy`). A request that finds no room asks idle ones to leave, the least recently used first
(`IdleModels`); their worker hears of it at its next heartbeat (`evicted`), ends the slot, and the lease ends like any
other. The guards exclude each other: who occupies sees `evicted_at`, who evicts sees `job_id`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from sqlalchemy import Connection, select, update

from orchestrator.leases import LeaseState, ResidentSlot
from orchestrator.placement import Ask, Cluster, Resident, evictions
from orchestrator.store.dialect import by_key, in_order, seconds_since, utc_now, walking
from orchestrator.store.leases import LIVE
from orchestrator.store.schema import lease_gpus, leases

_IDLE = (*LIVE, leases.c.resident, leases.c.job_id.is_(None), leases.c.evicted_at.is_(None))


class Model(NamedTuple):
    """A model in memory: the key of its lease, and the slot that keeps it."""

    key: str
    slot: str
    type: str
    model_id: str | None = None
    pinned: bool = False


def keep(conn: Connection, key: str, model: Model) -> bool:
    """The job is over, its model stays, under a lease of its own name. False when the lease ended meanwhile."""
    kept = conn.execute(
        by_key(update(leases))
        .where(leases.c.token == key, *LIVE)
        .values(
            token=model.key,
            resident=True,
            job_id=None,
            slot=model.slot,
            job_type=model.type,
            model_id=model.model_id,
            pinned=model.pinned,
            idle_since=utc_now(),
        )
    )
    if kept.rowcount and key != model.key:
        conn.execute(update(lease_gpus).where(lease_gpus.c.token == key).values(token=model.key))
    return kept.rowcount == 1


def occupy(conn: Connection, slot: ResidentSlot, job_id: str, worker_id: str) -> bool:
    """Run a job under a warm model's lease, unless it ended or was asked to leave."""
    taken = conn.execute(
        by_key(update(leases))
        .where(leases.c.token == slot.key, leases.c.worker_id == worker_id, leases.c.expires_at > utc_now(), *_IDLE)
        .values(job_id=job_id, idle_since=None)
    )
    return taken.rowcount == 1


def vacate(conn: Connection, key: str, job_id: str) -> None:
    """The job for which a warm model's lease was occupied never started. Who only shared it leaves it as it is."""
    mine = by_key(update(leases)).where(leases.c.token == key, leases.c.state == LeaseState.ACTIVE, leases.c.resident)
    conn.execute(mine.where(leases.c.job_id == job_id).values(job_id=None, idle_since=utc_now()))


def loaded(conn: Connection, key: str) -> None:
    """A model that no job asked for yet is in memory now, and idle."""
    fresh = (
        leases.c.token == key,
        leases.c.state == LeaseState.ACTIVE,
        leases.c.job_id.is_(None),
        leases.c.idle_since.is_(None),
    )
    conn.execute(by_key(update(leases)).where(*fresh, leases.c.resident).values(idle_since=utc_now()))


def pinned_mb(conn: Connection, node_id: str) -> dict[str, int]:
    """By GPU of this node, what models hold that leave for nobody."""
    rows = conn.execute(
        select(lease_gpus.c.gpu_uuid, lease_gpus.c.memory_mb)
        .select_from(leases.join(lease_gpus, lease_gpus.c.token == leases.c.token))
        .where(leases.c.node_id == node_id, leases.c.state == LeaseState.ACTIVE, leases.c.resident, leases.c.pinned)
    )
    held: Counter[str] = Counter()
    for row in rows:
        held[row.gpu_uuid] += row.memory_mb
    return dict(held)


def warm_nodes(conn: Connection, models: Collection[str]) -> dict[str, frozenset[str]]:
    """By model, the nodes that have it in memory."""
    loaded = (
        select(leases.c.model_id, leases.c.node_id)
        .where(leases.c.state == LeaseState.ACTIVE, leases.c.resident, leases.c.model_id.in_(models))
        .distinct()
    )
    rows = conn.execute(walking(loaded, leases, "ix_leases_expiry")).all()
    return {model: frozenset(row.node_id for row in rows if row.model_id == model) for model in models}


class IdleModels:
    """Warm models that do nothing, looked up when somebody in a batch of requests first needs their room."""

    def __init__(self, conn: Connection, min_s: float, node_id: str | None = None) -> None:
        self._conn = conn
        self._min_s = min_s
        self._node_id = node_id
        self._idle: list[Resident] | None = None

    def make_room(self, cluster: Cluster, ask: Ask) -> int:
        """Ask as many to leave as this request needs; how many were asked."""
        if self._idle is None:
            self._idle = _idle(self._conn, self._node_id)
        chosen = evictions(cluster, ask, self._idle, self._min_s) if self._idle else ()
        self._idle = [resident for resident in self._idle if resident not in chosen]
        return ask_to_leave(self._conn, [resident.key for resident in chosen])


def ask_to_leave(conn: Connection, keys: Sequence[str]) -> int:
    """Have idle models leave; how many were asked. Their workers hear of it.

    Whoever holds a row is about to use or to end it, and is not waited for. That keeps this free of deadlocks: all
    others lock leases before GPUs, and here GPUs may be locked already.
    """
    if not keys:
        return 0
    mine = select(leases.c.token).where(leases.c.token.in_(keys), *_IDLE).with_for_update(skip_locked=True)
    free = list(conn.execute(mine).scalars())
    return conn.execute(
        by_key(update(leases)).where(leases.c.token.in_(free), *_IDLE).values(evicted_at=utc_now())
    ).rowcount


def _idle(conn: Connection, node_id: str | None) -> list[Resident]:
    query = (
        select(
            leases.c.token,
            leases.c.memory_mb,
            leases.c.pinned,
            seconds_since(leases.c.idle_since).label("idle_s"),
            seconds_since(leases.c.created_at).label("resident_s"),
            lease_gpus.c.gpu_uuid,
        )
        .select_from(leases.join(lease_gpus, lease_gpus.c.token == leases.c.token))
        .where(*_IDLE)
        .order_by(leases.c.token, lease_gpus.c.gpu_uuid)
    )
    here = query.where(leases.c.node_id == node_id) if node_id else walking(query, leases, "ix_leases_expiry")
    rows = conn.execute(in_order(here)).all()
    found = []
    for token, group in groupby(rows, key=lambda row: row.token):
        shares = list(group)
        uuids = tuple(share.gpu_uuid for share in shares)
        one = shares[0]
        idle_s, resident_s = float(one.idle_s or 0.0), float(one.resident_s)
        found.append(Resident(token, uuids, one.memory_mb, idle_s, resident_s, pinned=bool(one.pinned)))
    return found


def evicted(
    conn: Connection, node_id: str, worker_ids: Collection[str], kept: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the models that workers of a node keep, by their leases: those asked to leave, and those whose lease is over.

    The lease of one that was kept only just now may not be written yet, and seems to be over.
    """
    rows = conn.execute(
        select(leases.c.token, leases.c.evicted_at).where(
            leases.c.node_id == node_id,
            *LIVE,
            leases.c.worker_id.in_(sorted(worker_ids)),
            leases.c.resident,
        )
    ).all()
    alive = {row.token for row in rows}
    asked = tuple(row.token for row in rows if row.evicted_at is not None)
    return asked, tuple(key for key in sorted(kept) if key not in alive)
