"""Questions about jobs. None of these take a lock, and each follows an index.

There is none of types, of tags, of the lanes of jobs that are over: each would cost every submit. Whoever looks for
those walks along the index that there is (`paging.Way`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from orchestrator.errors import JobNotFound, ResultNotFound
from orchestrator.jobs import OWNED, TERMINAL, Status
from orchestrator.jsontext import listed
from orchestrator.leases import LeaseState
from orchestrator.store import paging
from orchestrator.store.dialect import json_has, seconds_since, unled, walking
from orchestrator.store.hot import Hot
from orchestrator.store.schema import LIVE_WORKERS, jobs, leases, results, workers

#: Columns that are nobody's business outside.
_HIDDEN = {"payload_hash", "lease_token", "rank", "expires_at", "held_caps", "spawned", "ready_at"}
_SHOWN = [column for column in jobs.c if column.name not in _HIDDEN]
#: A page of jobs leaves out what may be a megabyte each.
_LISTED = [column for column in _SHOWN if column.name != "payload"]

#: The filters that have an index, the narrow ones first, and the index of those without any.
_INDEXES = {"workflow_id": "ix_jobs_workflow", "agent": "ix_jobs_agent", "status": "ix_jobs_status"}
_OF_ALL = "ix_jobs_created"


@dataclass(frozen=True)
class Filter:
    status: Status | None = None
    agent: str | None = None
    pool_id: str | None = None
    type: str | None = None
    workflow_id: str | None = None
    tag: str | None = None

    @property
    def leading(self) -> str | None:
        """The one whose index is followed. What is owned is never much, whoever's it is."""
        if self.status in OWNED:
            return "status"
        return next((name for name in _INDEXES if getattr(self, name) is not None), None)

    def conditions(self) -> dict[str, ColumnElement[bool]]:
        return {name: self._is(name, value) for name, value in vars(self).items() if value is not None}

    def _is(self, name: str, value: str) -> ColumnElement[bool]:
        if name == "tag":
            return json_has(jobs.c.tags, value)
        column = jobs.c.lane if name == "pool_id" else jobs.c[name]
        return (column if name == self.leading else unled(column)) == value


def get(conn: Connection, job_id: str) -> dict[str, Any]:
    """The whole record, with the result when there is one. Raises JobNotFound."""
    row = conn.execute(select(*_SHOWN).where(jobs.c.job_id == job_id)).one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    record = _readable(row._asdict())
    record["payload"] = json.loads(row.payload)
    if row.status == Status.DONE:
        record |= _result(conn, job_id) or {"result": None}
    return record


def result(conn: Connection, job_id: str) -> dict[str, Any]:
    """What a finished job returned. Raises JobNotFound or ResultNotFound."""
    found = _result(conn, job_id)
    if found is None:
        raise ResultNotFound(job_id, status(conn, job_id))
    return found


def _result(conn: Connection, job_id: str) -> dict[str, Any] | None:
    row = conn.execute(select(results.c.result, results.c.run_seconds).where(results.c.job_id == job_id)).one_or_none()
    return None if row is None else {"result": json.loads(row.result), "run_seconds": row.run_seconds}


def status(conn: Connection, job_id: str) -> str:
    found: str | None = conn.execute(select(jobs.c.status).where(jobs.c.job_id == job_id)).scalar()
    if found is None:
        raise JobNotFound(job_id)
    return found


def redrives(conn: Connection, job_id: str) -> int:
    """How often the job was started over. Raises JobNotFound."""
    found: int | None = conn.execute(select(jobs.c.redrives).where(jobs.c.job_id == job_id)).scalar()
    if found is None:
        raise JobNotFound(job_id)
    return found


def ended(conn: Connection, job_ids: Sequence[str], limit: int, max_bytes: int) -> dict[str, Any]:
    """Of these, the records that are over, with results and without payloads: the first that fit into one answer.

    `more` says that others are over, too; `unknown` are those that nobody knows.
    """
    known = statuses(conn, job_ids)
    over = [job_id for job_id in job_ids if known.get(job_id) in TERMINAL]
    shown = _that_fit(conn, over[:limit], max_bytes)
    rows = conn.execute(select(*_LISTED).where(jobs.c.job_id.in_(shown))).all() if shown else []
    # One may have been started over since.
    records = {row.job_id: _readable(row._asdict()) for row in rows if row.status in TERMINAL}
    for row in conn.execute(select(results).where(results.c.job_id.in_(shown))) if shown else ():
        if row.job_id in records and records[row.job_id]["status"] == Status.DONE:
            records[row.job_id] |= {"result": json.loads(row.result), "run_seconds": row.run_seconds}
    return {
        "jobs": [records[job_id] for job_id in shown if job_id in records],
        "more": len(shown) < len(over),
        "unknown": [job_id for job_id in job_ids if job_id not in known],
    }


def _that_fit(conn: Connection, job_ids: Sequence[str], max_bytes: int) -> list[str]:
    """The first of them, as long as their results are no larger together; one at least."""
    if not job_ids:
        return []
    lengths = select(results.c.job_id, func.length(results.c.result).label("size"))
    sizes = {row.job_id: int(row.size) for row in conn.execute(lengths.where(results.c.job_id.in_(job_ids)))}
    sums = itertools.accumulate(sizes.get(job_id, 0) for job_id in job_ids)
    return [
        job_id
        for place, (job_id, total) in enumerate(zip(job_ids, sums, strict=True))
        if total <= max_bytes or not place
    ]


def terminal_among(conn: Connection, job_ids: list[str]) -> set[str]:
    """Which of these jobs have reached their end (or do not exist), in one question for all who wait."""
    rows = conn.execute(select(jobs.c.job_id, jobs.c.status).where(jobs.c.job_id.in_(job_ids)))
    running = {row.job_id for row in rows if row.status not in TERMINAL}
    return set(job_ids) - running


def page(conn: Connection, wanted: Filter, limit: int, cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """Newest first; the cursor of the next page, or None at the end. A page may be short, or empty, before that."""
    others = wanted.conditions()
    leading = [others.pop(wanted.leading)] if wanted.leading else []
    index = _INDEXES[wanted.leading] if wanted.leading else _OF_ALL
    way = paging.Way(jobs, index, jobs.c.created_at, jobs.c.job_id)
    shown, following = way.page(conn, select(*_LISTED), leading, [*others.values()], limit, cursor)
    return [_readable(row._asdict()) for row in shown], following


def _readable(record: dict[str, Any]) -> dict[str, Any]:
    record["tags"] = listed(record["tags"])
    record["concurrency_keys"] = listed(record["concurrency_keys"])
    record["constraints"] = json.loads(record["constraints"]) if record["constraints"] else None
    record["pool_id"] = record.pop("lane")
    asked, ended = record["cancel_requested_at"], record["finished_at"]
    record["stop_seconds"] = (ended - asked).total_seconds() if record["status"] == Status.CANCELLED and asked else None
    return record


#: Jobs of one status that statistics count: beyond that they say "at least".
MOST_COUNTED = 10_000
UNFINISHED = (Status.PENDING, *sorted(OWNED))


def stats(conn: Connection, most: int = MOST_COUNTED) -> dict[str, Any]:
    """Jobs by status; those that are not over by pool and agent, too. Bounded: the oldest `most` of each status."""
    statuses = {status: _counted(conn, status, most) for status in Status}
    pools: dict[str, dict[str, Any]] = {}
    agents: dict[str, dict[str, Any]] = {}
    for status in UNFINISHED:
        for lane, agent, count, age_s in _unfinished(conn, status, most):
            for groups, name in ((pools, lane), (agents, agent)):
                group = groups.setdefault(name, dict.fromkeys(UNFINISHED, 0) | {"oldest_pending_seconds": None})
                _add(group, status, count, age_s)
    return {
        "status": statuses,
        "pools": dict(sorted(pools.items())),
        "agents": dict(sorted(agents.items())),
        "oldest_pending_seconds": _oldest_pending_s(conn),
        "at_least": [status for status, count in statuses.items() if count >= most],
    }


def _add(group: dict[str, Any], status: Status, count: int, age_s: float) -> None:
    group[status] += count
    if status is Status.PENDING:
        group["oldest_pending_seconds"] = max(group["oldest_pending_seconds"] or 0.0, float(age_s))


def _counted(conn: Connection, status: Status, most: int) -> int:
    some = select(jobs.c.status).where(jobs.c.status == status).limit(most).subquery()
    return int(conn.execute(select(func.count()).select_from(some)).scalar_one())


def _unfinished(conn: Connection, status: Status, most: int) -> Sequence[Any]:
    """By lane and agent: how many, and the age of the oldest. They come in order of age, so each group's is exact."""
    some = select(jobs.c.lane, jobs.c.agent, jobs.c.created_at).where(jobs.c.status == status)
    first = walking(some.order_by(jobs.c.created_at).limit(most), jobs, "ix_jobs_status").subquery()
    age = seconds_since(func.min(first.c.created_at))
    query = select(first.c.lane, first.c.agent, func.count(), age).group_by(first.c.lane, first.c.agent)
    return conn.execute(query).all()


def _oldest_pending_s(conn: Connection) -> float | None:
    oldest = select(seconds_since(jobs.c.created_at)).where(jobs.c.status == Status.PENDING)
    age = conn.execute(oldest.order_by(jobs.c.created_at).limit(1)).scalar()
    return None if age is None else max(float(age), 0.0)


@dataclass(frozen=True)
class PoolLiveness:
    pool_id: str
    workers: int
    silent_s: float


def live_pools(conn: Connection) -> list[PoolLiveness]:
    """Per pool with live workers: how many, and how long ago the most silent of them was heard."""
    rows = conn.execute(
        select(workers.c.pool_id, func.count(), func.max(seconds_since(workers.c.last_heartbeat)))
        .where(workers.c.status.in_(LIVE_WORKERS))
        .group_by(workers.c.pool_id)
    )
    return [PoolLiveness(pool_id, count, max(0.0, float(silent))) for pool_id, count, silent in rows]


def active_leases(conn: Connection) -> int:
    """Those of GPUs: one that fell back to a CPU holds no memory."""
    held = select(func.count()).where(leases.c.state == LeaseState.ACTIVE, leases.c.mode == "gpu")
    return int(conn.execute(held).scalar_one())


_STATUSES = Hot(lambda ids: select(jobs.c.job_id, jobs.c.status).where(jobs.c.job_id.in_(ids)))


def statuses(conn: Connection, job_ids: Sequence[str]) -> dict[str, Status]:
    """Where each of these jobs stands; those nobody knows are left out."""
    return {job_id: Status(status) for job_id, status in _STATUSES.rows(conn, job_ids)}
