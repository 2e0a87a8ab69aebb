"""Jobs that ended badly, all of them together: failed ones and dead letters, to be started over.

A dead letter waits for somebody's decision in a table of its own; a failed job has only its status. Who wants
everything to run again that did not succeed does not care which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, literal, select

from orchestrator.jobs import Status
from orchestrator.store import dead_letters, paging
from orchestrator.store.dead_letters import Meant, Removed
from orchestrator.store.dialect import unled
from orchestrator.store.schema import jobs

#: What counts as failed; a job that was cancelled ended as somebody wished.
FAILED = (Status.FAILED, Status.DEAD_LETTER)


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
            (unled(jobs.c.type), self.type),
            (unled(jobs.c.agent), self.agent),
            (unled(jobs.c.lane), self.pool_id),
            (jobs.c.error_kind, self.error_kind),
        )
        return [unled(jobs.c.workflow_id).is_(None), *(column == value for column, value in named if value is not None)]


_COLUMNS = jobs.c.created_at, jobs.c.job_id, jobs.c.redrives, literal(value=False)
_OLDEST = paging.Way(jobs, "ix_jobs_status", jobs.c.created_at, jobs.c.job_id, oldest_first=True)


def look(conn: Connection, wanted: Filter, status: Status, cursor: str | None) -> tuple[list[Meant], str | None]:
    """Those that are meant and ended like this, the longest known first, and where the next look begins.

    Whoever changes them names them: a transaction that runs again after a lost answer then meets its own work, and a
    job that fails again meanwhile is not started over again.
    """
    ended, others = [jobs.c.status == status], wanted.conditions()
    found, following = _OLDEST.page(conn, select(*_COLUMNS), ended, others, paging.WINDOW, cursor)
    return [Meant._make(row) for row in found], following


def redrive(conn: Connection, job_ids: Sequence[str], redrive_max: int, delay: Callable[[int], float]) -> Removed:
    """→ pending for those of these that are failed or dead letters, and were not redriven too often already."""
    return dead_letters.redrive_ended(conn, job_ids, FAILED, redrive_max, delay)
