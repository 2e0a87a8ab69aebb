"""Jobs that ended badly, all of them together: failed ones and dead letters, to be started over.

A dead letter waits for somebody's decision in a table of its own; a failed job has only its status. Who wants
everything to run again that did not succeed does not care which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, func, select

from orchestrator.jobs import Status
from orchestrator.store import dead_letters
from orchestrator.store.dead_letters import Removed
from orchestrator.store.dialect import walking
from orchestrator.store.schema import jobs

#: What counts as failed; a job that was cancelled ended as somebody wished.
FAILED = (Status.FAILED, Status.DEAD_LETTER)
#: Failed jobs that are counted; beyond that it is "at least".
MOST_COUNTED = 10_000


@dataclass(frozen=True)
class Filter:
    """Which failed jobs are meant; all of them unless something is named. Tasks start over with their workflow."""

    statuses: tuple[Status, ...] = FAILED
    type: str | None = None
    agent: str | None = None
    pool_id: str | None = None
    error_kind: str | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        named = (
            (jobs.c.type, self.type),
            (jobs.c.agent, self.agent),
            (jobs.c.lane, self.pool_id),
            (jobs.c.error_kind, self.error_kind),
        )
        return [jobs.c.workflow_id.is_(None), *(column == value for column, value in named if value is not None)]


def count(conn: Connection, wanted: Filter, *more: ColumnElement[bool], most: int = MOST_COUNTED) -> int:
    """How many are meant, counted up to `most`."""
    total = 0
    for status in wanted.statuses:
        some = select(jobs.c.status).where(jobs.c.status == status, *wanted.conditions(), *more).limit(most - total)
        total += int(conn.execute(select(func.count()).select_from(some.subquery())).scalar_one())
    return total


def exhausted(conn: Connection, wanted: Filter, redrive_max: int) -> int:
    """How many of them were started over as often as allowed, counted like the others."""
    return count(conn, wanted, jobs.c.redrives >= redrive_max)


def matching(conn: Connection, wanted: Filter, limit: int, redrive_max: int) -> list[str]:
    """Those that are meant and may start over, the longest known first.

    Whoever changes them names them: a transaction that runs again after a lost answer then meets its own work, and a
    job that fails again meanwhile is not started over again.
    """
    found: list[tuple[object, str]] = []
    for status in wanted.statuses:
        query = walking(select(jobs.c.created_at, jobs.c.job_id), jobs, "ix_jobs_status").where(
            jobs.c.status == status, jobs.c.redrives < redrive_max, *wanted.conditions()
        )
        rows = conn.execute(query.order_by(jobs.c.created_at).limit(limit))
        found += [(row.created_at, row.job_id) for row in rows]
    return [job_id for _, job_id in sorted(found, key=lambda one: (str(one[0]), one[1]))[:limit]]


def redrive(conn: Connection, job_ids: Sequence[str], redrive_max: int, delay: Callable[[int], float]) -> Removed:
    """→ pending for those of these that are failed or dead letters, and were not redriven too often already."""
    return dead_letters.redrive_ended(conn, job_ids, FAILED, redrive_max, delay)
