"""Pools as rows: what operators ask for, and the one way to change a pool's status.

Every change is guarded by the status it may leave and writes its audit row in the same transaction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection, Row, Select, and_, case, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator import pools as rules
from orchestrator.errors import InvalidInput, PoolBusy, PoolClosed, PoolExists, PoolNotFound
from orchestrator.jobs import DEFAULT_LANE, OWNED
from orchestrator.pools import CLOSED, OPEN, PoolArrow, PoolChange, PoolSpec, PoolState
from orchestrator.store import audit
from orchestrator.store.dialect import by_key, seconds_since, utc_now, utc_shift
from orchestrator.store.schema import ACTIVE, LIVE_WORKERS, jobs, pool_assignments, worker_pools, workers
from orchestrator.wording import first_wrong

_SPEC = tuple(name for name in PoolSpec.model_fields if name != "metadata")


def create(conn: Connection, spec: PoolSpec) -> tuple[str, bool]:
    """A new pool, or one that was closed and begins anew; its id, and whether anything changed.

    Asking again for what is there is fine. Raises PoolExists for other content, PoolClosed while it drains. A spec
    without an id gets one here; whoever may have to ask again names it before.
    """
    if spec.pool_id == DEFAULT_LANE:
        raise InvalidInput(f"pool_id: {DEFAULT_LANE!r} is the lane of jobs without a pool", "pool_id")
    spec = spec.named()
    pool_id = str(spec.pool_id)
    row = lock(conn, pool_id)
    if row is None:
        try:
            with conn.begin_nested():
                revision = _unused_revision(conn, pool_id)
                conn.execute(insert(worker_pools), {**_columns(spec), "pool_id": pool_id, "revision": revision})
                conn.execute(delete(pool_assignments).where(pool_assignments.c.pool_id == pool_id))
        except IntegrityError:  # somebody was quicker
            return create(conn, spec)
        _tell(conn, rules.CREATE.event, pool_id, spec.model_dump(exclude_defaults=True))
        return pool_id, True
    state = PoolState(row.status)
    if state is PoolState.DRAINING:
        raise PoolClosed(pool_id, state)
    if state in OPEN:
        if spec != _spec(row):
            raise PoolExists(pool_id)
        return pool_id, False
    _begin_anew(conn, row, spec)
    return pool_id, True


def _unused_revision(conn: Connection, pool_id: str) -> int:
    """A revision above all that a deleted pool of this name had: one and the same must not mean two models."""
    last = conn.execute(select(func.max(pool_assignments.c.revision)).where(pool_assignments.c.pool_id == pool_id))
    return (last.scalar() or 0) + 1


def _begin_anew(conn: Connection, row: Row[Any], spec: PoolSpec) -> None:
    values = {**_columns(spec), "revision": row.revision + 1, "active_at": utc_now()}
    move(conn, rules.CREATE, row.pool_id, drain_until=None, started_at=None, status_reason=None, **values)


def change(conn: Connection, pool_id: str, wish: PoolChange) -> None:
    """Scale it, or swap its model: then its revision grows, and workers of the new one take over from the old.

    Raises PoolNotFound, PoolClosed, or InvalidInput when the whole makes no sense.
    """
    row = _known(conn, pool_id)
    if row.status not in OPEN:
        raise PoolClosed(pool_id, row.status)
    before = _spec(row)
    try:
        after = before.changed(wish.given)
    except ValidationError as wrong:
        field, words = first_wrong(wrong)
        raise InvalidInput(f"{field}: {words}" if field else words, field or None) from None
    changed = {name for name in PoolSpec.model_fields if getattr(before, name) != getattr(after, name)}
    if not changed:
        return
    swapped = 1 if changed & rules.SWAPPED else 0
    conn.execute(
        update(worker_pools)
        .where(worker_pools.c.pool_id == pool_id)
        .values(**_columns(after), revision=row.revision + swapped, active_at=utc_now())
    )
    details = {name: [getattr(before, name), getattr(after, name)] for name in sorted(changed)}
    _tell(conn, "pool.swapped" if swapped else "pool.changed", pool_id, details)


class Closing(NamedTuple):
    """Where a pool is that should end; `already`: somebody had ended it before, and nothing was changed."""

    state: PoolState
    already: bool = False


def drain(conn: Connection, pool_id: str, timeout_s: float) -> Closing:
    """Take no new jobs; those that run may end within `timeout_s`. Asking again sets that time anew."""
    row = _known(conn, pool_id)
    state = PoolState(row.status)
    if state in CLOSED:
        return Closing(state, already=True)
    if state is PoolState.DRAINING:
        deadline = update(worker_pools).where(worker_pools.c.pool_id == pool_id)
        conn.execute(deadline.values(drain_until=utc_shift(timeout_s)))
        _tell(conn, rules.DRAIN.event, pool_id, {"timeout_seconds": timeout_s})
        return Closing(state)
    move(conn, rules.DRAIN, pool_id, {"timeout_seconds": timeout_s}, drain_until=utc_shift(timeout_s))
    return Closing(PoolState.DRAINING)


def evict(conn: Connection, pool_id: str) -> Closing:
    """End it now: what runs is handed back."""
    row = _known(conn, pool_id)
    if row.status in CLOSED:
        return Closing(PoolState(row.status), already=True)
    move(conn, rules.EVICT, pool_id, drain_until=utc_now())
    return Closing(PoolState.EVICTED)


def forget(conn: Connection, pool_id: str) -> None:
    """Delete a closed pool. Raises PoolBusy while it is open or has workers."""
    row = _known(conn, pool_id)
    if row.status not in CLOSED or _live(conn, pool_id):
        raise PoolBusy(pool_id, row.status)
    conn.execute(delete(pool_assignments).where(pool_assignments.c.pool_id == pool_id))
    # What is left of it: nobody anywhere, of its last revision. The next pool of this name begins after that.
    nobody = {"pool_id": pool_id, "node_id": "", "revision": row.revision, "workers": 0}
    conn.execute(insert(pool_assignments), nobody)
    conn.execute(delete(worker_pools).where(worker_pools.c.pool_id == pool_id))
    _tell(conn, "pool.deleted", pool_id)


def move(
    conn: Connection,
    arrow: PoolArrow,
    pool_id: str,
    details: dict[str, Any] | None = None,
    **values: Any,
) -> bool:
    """Along one arrow, if the pool is where it starts; whether it was."""
    moved = conn.execute(
        by_key(update(worker_pools))
        .where(worker_pools.c.pool_id == pool_id, worker_pools.c.status.in_(sorted(arrow.source)))
        .values(status=arrow.target, **values)
    )
    if moved.rowcount:
        _tell(conn, arrow.event, pool_id, details)
    return moved.rowcount == 1


def lock(conn: Connection, pool_id: str) -> Row[Any] | None:
    return conn.execute(select(worker_pools).where(worker_pools.c.pool_id == pool_id).with_for_update()).one_or_none()


_STATE = select(worker_pools.c.status)


def closed_to_claims(conn: Connection, pool_id: str) -> PoolState | None:
    """The state of a pool that takes no jobs, None of one that does; a lane without a pool is open.

    The row stays locked against change: a drain waits for claims under way, and none begins after it.
    """
    found = conn.execute(_STATE.where(worker_pools.c.pool_id == pool_id).with_for_update(read=True)).scalar()
    return PoolState(found) if found is not None and found not in OPEN else None


def takes_jobs(conn: Connection, pool_id: str) -> bool:
    """As above, at a glance."""
    found = conn.execute(_STATE.where(worker_pools.c.pool_id == pool_id)).scalar()
    return found is None or found in OPEN


# ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────


def list_pools(conn: Connection, limit: int = 1000, after: str | None = None) -> list[dict[str, Any]]:
    """Pools with what their live workers do, by id, those behind `after`."""
    query = _LISTED.order_by(worker_pools.c.pool_id).limit(limit)
    found = conn.execute(query if after is None else query.where(worker_pools.c.pool_id > after))
    return [_readable(row) for row in found]


def _listed() -> Select[Any]:
    live = (
        select(
            workers.c.pool_id,
            func.count().label("workers"),
            func.sum(workers.c.busy).label("running"),
            func.sum(case((workers.c.status == ACTIVE, workers.c.ready), else_=0)).label("ready_slots"),
            func.max(workers.c.last_heartbeat).label("heard_at"),
            func.avg(workers.c.load_seconds).label("load_seconds"),
        )
        .where(workers.c.status.in_(LIVE_WORKERS))
        .group_by(workers.c.pool_id)
        .subquery()
    )
    left_s = case((worker_pools.c.drain_until.is_not(None), -seconds_since(worker_pools.c.drain_until)))
    totals = [column for column in live.c if column is not live.c.pool_id]
    return select(worker_pools, *totals, left_s.label("drain_seconds_left")).select_from(
        worker_pools.outerjoin(live, live.c.pool_id == worker_pools.c.pool_id)
    )


_LISTED = _listed()

#: What is told of each worker of a pool.
_MEMBER = ("worker_id", "node_id", "status", "revision", "slots", "ready", "busy", "trouble", "load_seconds")


def _with_members() -> Select[Any]:
    """One row for each worker: one statement, or what was counted would not be who is named."""
    member = workers.alias("member")
    works = and_(member.c.pool_id == worker_pools.c.pool_id, member.c.status.in_(LIVE_WORKERS))
    named = [member.c[name].label(f"member_{name}") for name in _MEMBER]
    return _LISTED.add_columns(*named).outerjoin(member, works).order_by(member.c.worker_id)


_WITH_MEMBERS = _with_members()


def get(conn: Connection, pool_id: str) -> dict[str, Any]:
    """One pool, its workers, and how long the oldest of its running jobs has run. Raises PoolNotFound."""
    rows = conn.execute(_WITH_MEMBERS.where(worker_pools.c.pool_id == pool_id)).all()
    if not rows:
        raise PoolNotFound(pool_id)
    oldest = conn.execute(
        select(func.max(seconds_since(jobs.c.claimed_at))).where(
            jobs.c.status.in_(sorted(OWNED)), jobs.c.lane == pool_id
        )
    ).scalar()
    places = conn.execute(select(pool_assignments).where(pool_assignments.c.pool_id == pool_id))
    return _readable(rows[0]) | {
        "oldest_running_seconds": None if oldest is None else float(oldest),
        "assignments": [row._asdict() for row in places],
        "members": [_member(row) for row in rows if row.member_worker_id is not None],
    }


def counts(conn: Connection) -> dict[str, int]:
    """How many pools are in which state; those in which none is are absent."""
    rows = conn.execute(select(worker_pools.c.status, func.count()).group_by(worker_pools.c.status))
    return {status: count for status, count in rows}  # noqa: C416 - a Row is no pair to mypy


def open_ids(conn: Connection, limit: int) -> list[str]:
    query = select(worker_pools.c.pool_id).where(worker_pools.c.status.in_(sorted(OPEN)))
    return list(conn.execute(query.order_by(worker_pools.c.pool_id).limit(limit)).scalars())


def _member(row: Row[Any]) -> dict[str, Any]:
    return {name: getattr(row, f"member_{name}") for name in _MEMBER}


def _readable(row: Row[Any]) -> dict[str, Any]:
    record = {name: getattr(row, name) for name in _LISTED.selected_columns.keys()}  # noqa: SIM118 - not a dict
    record["last_heartbeat"] = record.pop("heard_at") or record["last_heartbeat"]
    record["metadata"] = rules.read_metadata(record["metadata"])
    record["autosize"] = bool(record["autosize"])
    left = record.pop("drain_seconds_left")
    record["drain_seconds_left"] = max(float(left), 0.0) if row.status == PoolState.DRAINING and left else None
    for name in ("workers", "running", "ready_slots"):
        record[name] = int(record[name] or 0)
    record["load_seconds"] = None if record["load_seconds"] is None else float(record["load_seconds"])
    return record


def _columns(spec: PoolSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in _SPEC if name != "pool_id"} | {
        "metadata": rules.metadata_text(spec.metadata)
    }


def _spec(row: Row[Any]) -> PoolSpec:
    """Not checked: a pool that was made under wider limits can still be changed into one within them."""
    known = row._asdict() | {"metadata": rules.read_metadata(row.metadata), "autosize": bool(row.autosize)}
    return PoolSpec.model_construct(**{name: known[name] for name in PoolSpec.model_fields})


def _known(conn: Connection, pool_id: str) -> Row[Any]:
    row = lock(conn, pool_id)
    if row is None:
        raise PoolNotFound(pool_id)
    return row


def _live(conn: Connection, pool_id: str) -> bool:
    alive = select(workers.c.worker_id).where(workers.c.pool_id == pool_id, workers.c.status.in_(LIVE_WORKERS))
    return conn.execute(alive.limit(1)).scalar() is not None


def _tell(conn: Connection, event: str, pool_id: str, details: dict[str, Any] | None = None) -> None:
    audit.record(conn, [audit.Event(event, pool_id=pool_id, details=details)])
