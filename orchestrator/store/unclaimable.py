"""Jobs whose claim breaks, whatever it breaks on: each is found among its neighbours, and harms none of them.

What breaks on the job itself, such as a row that somebody edited by hand, is charged like any attempt that failed: it
is tried later and later, and ends as a dead letter. What the server said under a name that nobody knows is no fault of
the job, which is put off. A row that cannot even be written stays announced, without an entry: the leader's `repair`
brings it again, at its pace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import update
from sqlalchemy.exc import DBAPIError, ProgrammingError

from orchestrator import jobs as job_rules
from orchestrator.errors import DatabaseUnavailable, Unavailable
from orchestrator.jobs import ErrorKind, RetryPolicy, Status
from orchestrator.store import audit, ownership
from orchestrator.store.database import CONTENT_ERRORS, Database, RowsHeld, Waiting
from orchestrator.store.moves import Claimant, job_event, move
from orchestrator.store.schema import jobs
from orchestrator.store.settle import End, Outcome, Settled, record
from orchestrator.wording import telling_line

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds until a job is offered again whose claim broke and could not be charged.
PUT_OFF_S = 60.0


def claim_apart(
    job_ids: Sequence[str],
    claim: Callable[[Sequence[str]], dict[str, T]],
    leave: Callable[[str, Exception], T],
    error: Exception,
) -> dict[str, T]:
    """Claim the halves of what could not be claimed together, down to the job at fault: for that one `leave` answers.

    Raises Unavailable: no split mends a server that is away.
    """
    if len(job_ids) == 1:
        return {job_ids[0]: leave(job_ids[0], error)}
    answers: dict[str, T] = {}
    for part in (job_ids[: len(job_ids) // 2], job_ids[len(job_ids) // 2 :]):
        try:
            answers |= claim(part)
        except Exception as broken:
            if isinstance(broken, Unavailable) and not isinstance(broken, RowsHeld):
                raise
            answers |= claim_apart(part, claim, leave, broken)
    return answers


def put_off(
    db: Database, by: Claimant, job_id: str, error: Exception, policy: RetryPolicy
) -> tuple[str, list[Settled]]:
    """See to a job whose claim breaks even when nobody else's is part of it: why it waits, and what that led to.

    Raises DatabaseUnavailable when it is the server that cannot write now.
    """
    reason = f"it cannot be claimed: {_said(error)}"
    log.error("a job cannot be claimed", extra={"job_id": job_id, "worker_id": by.worker_id, "error": reason})
    with suppress(RowsHeld):  # somebody sees to it at this moment, or the leader will
        for write in (_charge, _defer) if _is_about_the_job(error) else (_defer,):
            with suppress(*CONTENT_ERRORS):
                return reason, _written(db, partial(write, by=by, job_id=job_id, reason=reason, policy=policy))
        log.error("a job cannot even be put off", extra={"job_id": job_id})  # correct its row, or delete it
    return reason, []


def _is_about_the_job(error: Exception) -> bool:
    """A table or a column that is not there is nobody's fault but ours: no job is charged for it."""
    return isinstance(error, CONTENT_ERRORS) and not isinstance(error, ProgrammingError)


def _written(db: Database, work: Callable[[Connection], list[Settled]]) -> list[Settled]:
    try:
        return db.write_batch(work, Waiting.NOT)
    except (Unavailable, *CONTENT_ERRORS):
        raise
    except Exception as error:
        raise DatabaseUnavailable(f"the claim failed: {_said(error)}") from error


def _charge(conn: Connection, by: Claimant, job_id: str, reason: str, policy: RetryPolicy) -> list[Settled]:
    """Pending → claimed → what follows a failed attempt, if it still waits."""
    row = ownership.lock(conn, [job_id]).get(job_id)
    if row is None or row.status != Status.PENDING:
        return []
    taken: dict[str, Any] = {"worker_id": by.worker_id, "owner_pool": by.pool_id, "leased": False}
    move(conn, job_rules.CLAIM, row.attempt, [job_id], **taken)
    audit.record(conn, [job_event(job_rules.CLAIM, job_id, row.attempt + 1, by, None)])
    end = End(job_id, row.attempt + 1, Outcome.FAILED, error_kind=ErrorKind.TRANSIENT, error=reason)
    settled = record(conn, by, [], [end], policy)
    waits = update(jobs).where(jobs.c.job_id == job_id, jobs.c.status == Status.PENDING)
    conn.execute(waits.values(wait_reason=reason[:255]))
    return settled


def _defer(conn: Connection, job_id: str, reason: str, **_how: object) -> list[Settled]:
    row = ownership.lock(conn, [job_id]).get(job_id)
    if row is not None:
        move(conn, job_rules.DEFER, row.attempt, [job_id], wait_reason=reason[:255], delay_s=PUT_OFF_S)
    return []


def _said(error: Exception) -> str:
    """In one line, and nothing of a statement, which may have a payload."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return f"{type(error).__name__}: {telling_line(str(cause))}"
