"""The GPUs of all nodes: what samples say of them, what leases took of them, and whether they may be given out.

`leased_mb` is the account: only `take` and `give` change it, both in the transaction that begins or ends the lease.
Everything else about a GPU comes from its node's samples, but for the quarantine, which an operator ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, case, func, or_, select, update

from orchestrator.errors import GpuNotFound
from orchestrator.gpu import Gpu, Health
from orchestrator.gpu.accounts import Holder, foreign_mb
from orchestrator.leases import LeaseState
from orchestrator.placement import GpuView, HostView
from orchestrator.settings import Settings
from orchestrator.store import audit
from orchestrator.store.dialect import by_key, seconds_since, upsert, utc_now, utc_shift
from orchestrator.store.hot import Hot
from orchestrator.store.schema import gpus, lease_gpus, leases, nodes

# ── what may be given out ───────────────────────────────────────────────────────────────────────────────────────

_FRESH = gpus.c.sampled_at > utc_shift(-bindparam("stale_s"))
_RESERVED: ColumnElement[Any] = case((gpus.c.reserved_until > utc_now(), gpus.c.reserved_for), else_=None)

#: The columns of a GpuView, in its order, and the time.
_VIEW = select(
    gpus.c.gpu_uuid,
    gpus.c.node_id,
    gpus.c.gpu_index,
    gpus.c.usable_mb,
    gpus.c.leased_mb,
    gpus.c.foreign_mb,
    gpus.c.health,
    _FRESH.label("fresh"),
    gpus.c.name,
    gpus.c.quarantined_at.is_not(None).label("quarantined"),
    gpus.c.gate_closed_at.is_not(None).label("gated"),
    _RESERVED.label("reserved_for"),
    utc_now().label("now"),
).order_by(gpus.c.gpu_uuid)
_VIEWS = Hot(lambda node_ids: _VIEW.where(gpus.c.node_id.in_(node_ids)) if node_ids else _VIEW)

_TAKE = Hot(
    lambda uuid: (
        update(gpus)
        .where(
            gpus.c.gpu_uuid == uuid[0],
            gpus.c.leased_mb + gpus.c.foreign_mb + bindparam("need") <= gpus.c.usable_mb,
            gpus.c.health == Health.OK,
            _FRESH,
            gpus.c.quarantined_at.is_(None),
            gpus.c.gate_closed_at.is_(None),
            or_(_RESERVED.is_(None), gpus.c.reserved_for == bindparam("key")),
        )
        .values(leased_mb=gpus.c.leased_mb + bindparam("need"), reserved_for=None, reserved_until=None)
    )
)
_GIVE = Hot(
    lambda uuid: (
        update(gpus)
        .where(gpus.c.gpu_uuid == uuid[0])
        # Never below zero, whoever edited the account: a lease that cannot end would hold up all others.
        .values(
            leased_mb=case((gpus.c.leased_mb < bindparam("amount"), 0), else_=gpus.c.leased_mb - bindparam("amount"))
        )
    )
)


def views(conn: Connection, stale_s: float, node_id: str | None = None) -> list[GpuView]:
    return views_and_time(conn, stale_s, node_id)[0]


def views_and_time(conn: Connection, stale_s: float, node_id: str | None) -> tuple[list[GpuView], datetime | None]:
    """The GPUs, and what time the database has; None when there are no GPUs."""
    rows = _VIEWS.rows(conn, [node_id] if node_id else [], stale_s=stale_s)
    return [GpuView(*row[:-1]) for row in rows], rows[0][-1] if rows else None


def take(conn: Connection, uuid: str, need_mb: int, stale_s: float, key: str = "") -> bool:
    """Take memory of one GPU if it is there to be taken. A reservation by `key` is used up by this."""
    return _TAKE.run(conn, [uuid], need=need_mb, stale_s=stale_s, key=key) == 1


def give(conn: Connection, amounts: Mapping[str, int]) -> None:
    """Return memory. Sorted, as all who lock several rows here do."""
    for uuid in sorted(amounts):
        _GIVE.run(conn, [uuid], amount=amounts[uuid])


def reserve(conn: Connection, uuids: Collection[str], key: str, seconds: float) -> bool:
    """Keep these GPUs for one job, all or none; asked again before the time is over, it goes on."""
    mine = or_(_RESERVED.is_(None), gpus.c.reserved_for == key)
    kept = conn.execute(
        by_key(update(gpus))
        .where(gpus.c.gpu_uuid.in_(sorted(uuids)), mine)
        .values(reserved_for=key, reserved_until=utc_shift(seconds))
    )
    if kept.rowcount != len(uuids):
        unreserve(conn, uuids, key)
    return kept.rowcount == len(uuids)


def unreserve(conn: Connection, uuids: Collection[str], key: str) -> None:
    mine = by_key(update(gpus)).where(gpus.c.gpu_uuid.in_(sorted(uuids)), gpus.c.reserved_for == key)
    conn.execute(mine.values(reserved_for=None, reserved_until=None))


def reservations(conn: Connection) -> dict[str, str]:
    """By GPU, the job that it is kept for."""
    rows = conn.execute(select(gpus.c.gpu_uuid, gpus.c.reserved_for).where(_RESERVED.is_not(None)))
    return {row.gpu_uuid: row.reserved_for for row in rows}


def largest_usable_mb(conn: Connection) -> int:
    """What the largest GPU of the cluster could lease when it is empty."""
    return int(conn.execute(select(func.max(gpus.c.usable_mb))).scalar() or 0)


# ── hosts ───────────────────────────────────────────────────────────────────────────────────────────────────────


#: What the accounts of a host that tells nothing can count.
MOST = 2**31 - 1


def hosts(conn: Connection) -> list[HostView]:
    """Processor time and memory that nodes have left; None for what a node does not tell."""
    rows = conn.execute(
        select(
            nodes.c.node_id,
            (nodes.c.cpu_milli - nodes.c.leased_cpu_milli).label("cpu_milli_free"),
            (nodes.c.memory_mb - nodes.c.leased_memory_mb).label("memory_mb_free"),
        )
    )
    return [HostView(**row._asdict()) for row in rows]


def take_host(conn: Connection, node_id: str, cpu_milli: int, memory_mb: int) -> bool:
    taken = conn.execute(
        update(nodes)
        .where(
            nodes.c.node_id == node_id,
            nodes.c.leased_cpu_milli + cpu_milli <= func.coalesce(nodes.c.cpu_milli, MOST),
            nodes.c.leased_memory_mb + memory_mb <= func.coalesce(nodes.c.memory_mb, MOST),
        )
        .values(
            leased_cpu_milli=nodes.c.leased_cpu_milli + cpu_milli,
            leased_memory_mb=nodes.c.leased_memory_mb + memory_mb,
        )
    )
    return taken.rowcount == 1


def give_host(conn: Connection, node_id: str, cpu_milli: int, memory_mb: int) -> None:
    cpu, memory = nodes.c.leased_cpu_milli, nodes.c.leased_memory_mb
    conn.execute(
        update(nodes)
        .where(nodes.c.node_id == node_id)
        .values(
            leased_cpu_milli=case((cpu < cpu_milli, 0), else_=cpu - cpu_milli),
            leased_memory_mb=case((memory < memory_mb, 0), else_=memory - memory_mb),
        )
    )


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Gate:
    """How full a GPU may become, and how long it stays closed when it became fuller."""

    pct: int
    hysteresis_pct: int = 5
    hold_s: float = 5.0

    @classmethod
    def of(cls, settings: Settings) -> Gate:
        return cls(settings.gpu_mem_gate_pct, settings.gpu_gate_hysteresis_pct, settings.gpu_gate_hold_s)


#: Characters of a UUID, and of other texts, in a row.
UUID_LENGTH, TEXT_LENGTH = 64, 255


def storable(sample: Iterable[Gpu]) -> list[Gpu]:
    """As rows can hold it: one number that the database refuses would fail the heartbeat that comes with it.

    A GPU whose UUID does not fit is left out: by another it could not be leased.
    """
    return [_storable(gpu) for gpu in sample if _text(gpu.uuid, UUID_LENGTH) == gpu.uuid]


def _storable(gpu: Gpu) -> Gpu:
    utilization, temperature_c = gpu.utilization, gpu.temperature_c
    return replace(
        gpu,
        index=_within(gpu.index),
        name=_text(gpu.name),
        total_mb=_within(gpu.total_mb),
        used_mb=_within(gpu.used_mb),
        utilization=utilization if utilization is not None and isfinite(utilization) else None,
        temperature_c=temperature_c if temperature_c is None else _within(temperature_c, -MOST),
        health_reason=gpu.health_reason and _text(gpu.health_reason),
    )


def _within(number: int, least: int = 0) -> int:
    return min(max(number, least), MOST)


def _text(text: str, length: int = TEXT_LENGTH) -> str:
    """Without halves of surrogate pairs."""
    return text[:length].encode(errors="replace").decode()


def record(conn: Connection, node_id: str, sample: Sequence[Gpu], gate: Gate, age_s: float = 0.0) -> None:
    """Store a node's sample, as one statement. `usable_mb` is what leases and foreign memory may fill together.

    A GPU that gives no answer keeps the numbers of its last sample; its health says that they are no news. Of a GPU
    that a neighbour measured later, this sample, taken `age_s` seconds ago, tells nothing: its row is left alone.
    """
    before, ages_s = _before(conn, node_id, [gpu.uuid for gpu in sample]) if sample else ({}, {})
    sample = [gpu for gpu in sample if not 0 <= ages_s.get(gpu.uuid, age_s) < age_s]
    if not sample:
        return
    held = holders(shares(conn, node_id))
    rows = [
        {
            "gpu_uuid": gpu.uuid,
            "node_id": node_id,
            "gpu_index": gpu.index,
            "name": gpu.name,
            "total_mb": gpu.total_mb,
            "usable_mb": gpu.total_mb * gate.pct // 100,
            "used_mb": gpu.used_mb,
            "foreign_mb": foreign_mb(gpu, held.get(gpu.uuid, []), before.get(gpu.uuid, 0)),
            "utilization": gpu.utilization,
            "temperature_c": gpu.temperature_c,
            "health": gpu.health,
            "health_reason": gpu.health_reason,
            "sampled_at": utc_shift(-age_s),
            "gate_closed_at": utc_now() if _over(gpu, gate.pct) else None,
        }
        for gpu in sorted(sample, key=lambda gpu: gpu.uuid)
    ]
    upsert(conn, gpus, rows, lambda new: {"gate_closed_at": _gate_closed_at(new, gate)})


def _over(gpu: Gpu, pct: int) -> bool:
    return gpu.used_mb * 100 > gpu.total_mb * pct


def _gate_closed_at(new: Any, gate: Gate) -> Any:
    """Closed again, still closed (too full to open, or not for long enough), or open."""
    low = gate.pct - gate.hysteresis_pct
    stays = or_(new.used_mb * 100 > new.total_mb * low, gpus.c.gate_closed_at > utc_shift(-gate.hold_s))
    return case((new.gate_closed_at.is_not(None), new.gate_closed_at), (stays, gpus.c.gate_closed_at), else_=None)


def _before(conn: Connection, node_id: str, uuids: Sequence[str]) -> tuple[dict[str, int], dict[str, float]]:
    """What is written down of these GPUs: foreign memory, and the age in seconds of this node's last sample."""
    age_s = seconds_since(gpus.c.sampled_at).label("age_s")
    known = select(gpus.c.gpu_uuid, gpus.c.node_id, gpus.c.foreign_mb, age_s).where(gpus.c.gpu_uuid.in_(uuids))
    rows = conn.execute(known).all()
    ages_s = {row.gpu_uuid: float(row.age_s) for row in rows if row.node_id == node_id and row.age_s is not None}
    return {row.gpu_uuid: row.foreign_mb for row in rows}, ages_s


def elsewhere(conn: Connection, node_id: str, uuids: Collection[str], recent_s: float) -> set[str]:
    """Which of these GPUs another node measured lately."""
    rows = conn.execute(
        select(gpus.c.gpu_uuid).where(
            gpus.c.gpu_uuid.in_(sorted(uuids)),
            gpus.c.node_id != node_id,
            gpus.c.sampled_at > utc_shift(-recent_s),
            gpus.c.health != Health.LOST,
        )
    )
    return set(rows.scalars())


def shares(conn: Connection, node_id: str, *more: ColumnElement[Any]) -> Sequence[Row[Any]]:
    """What leases hold on each GPU of this node, with `more` about them; those that are ending hold theirs still."""
    held = select(
        lease_gpus.c.gpu_uuid, lease_gpus.c.memory_mb, leases.c.worker_id, leases.c.slot, leases.c.pid, *more
    ).select_from(leases.join(lease_gpus, lease_gpus.c.token == leases.c.token))
    return conn.execute(held.where(leases.c.node_id == node_id, leases.c.state == LeaseState.ACTIVE)).all()


def holder(share: Row[Any]) -> Holder:
    return Holder(share.memory_mb, share.worker_id, share.slot, share.pid)


def holders(held: Iterable[Row[Any]]) -> dict[str, list[Holder]]:
    """By GPU, whose shares these are."""
    found: dict[str, list[Holder]] = {}
    for share in held:
        found.setdefault(share.gpu_uuid, []).append(holder(share))
    return found


def list_gpus(conn: Connection, stale_s: float) -> list[dict[str, Any]]:
    """Every GPU with all that is known; a reservation that ran out is none."""
    fresh = (gpus.c.sampled_at > utc_shift(-stale_s)).label("fresh")
    rows = conn.execute(select(gpus, fresh, _RESERVED.label("reserved")).order_by(gpus.c.node_id, gpus.c.gpu_index))
    found = [row._asdict() for row in rows]
    return [gpu | {"fresh": bool(gpu["fresh"]), "reserved_for": gpu.pop("reserved")} for gpu in found]


# ── quarantine ──────────────────────────────────────────────────────────────────────────────────────────────────


def quarantine(conn: Connection, uuids: Collection[str], reason: str) -> None:
    """Give nothing more of these GPUs until an operator clears them."""
    closed = conn.execute(
        by_key(update(gpus))
        .where(gpus.c.gpu_uuid.in_(sorted(uuids)), gpus.c.quarantined_at.is_(None))
        .values(quarantined_at=utc_now(), quarantine_reason=reason[:255])
    )
    if closed.rowcount:
        audit.record(conn, [audit.Event("gpu.quarantined", details={"gpus": sorted(uuids), "reason": reason})])


def clear(conn: Connection, uuid: str) -> bool:
    """End a quarantine; False when there was none. Raises GpuNotFound."""
    # Compared here too: MariaDB ignores spaces at the end.
    if conn.execute(select(gpus.c.gpu_uuid).where(gpus.c.gpu_uuid == uuid)).scalar() != uuid:
        raise GpuNotFound(uuid)
    cleared = conn.execute(
        update(gpus)
        .where(gpus.c.gpu_uuid == uuid, gpus.c.quarantined_at.is_not(None))
        .values(quarantined_at=None, quarantine_reason=None)
    )
    if cleared.rowcount:
        audit.record(conn, [audit.Event("gpu.cleared", details={"gpus": [uuid]})])
    return bool(cleared.rowcount)
