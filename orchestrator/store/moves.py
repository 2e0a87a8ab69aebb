"""The one way to change a job's status.

`move` is a single UPDATE, guarded by the states its arrow may leave and by the attempt that claims to own the job.
Whoever moves a job writes the arrow's audit row (`job_event`) in the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    Float,
    String,
    bindparam,
    case,
    func,
    literal,
    literal_column,
    update,
)

from orchestrator import jobs as job_rules
from orchestrator.jobs import OWNED, TERMINAL, Arrow, Queued
from orchestrator.leases import JOB_LEASE, Terms
from orchestrator.store import audit
from orchestrator.store.dialect import by_key, earlier, unled, utc_now, utc_shift
from orchestrator.store.hot import Hot
from orchestrator.store.schema import jobs


@dataclass(frozen=True)
class Claimant:
    """The worker that claims, and the terms on which it takes leases; one that is dead takes none any more."""

    worker_id: str
    node_id: str
    pool_id: str
    lease_ttl_s: float = 0.0
    terms: Terms = field(default_factory=lambda: Terms(0.0))
    #: The model of its pool: that of jobs which name none.
    model_id: str | None = None
    #: The process that uses what it leases, with all it starts; None for slots, which are recognised otherwise.
    pid: int | None = None

    @property
    def owner(self) -> str | None:
        """As it stands in the rows; nobody for jobs whose owner was not written down."""
        return self.worker_id or None


@lru_cache(maxsize=64)
def _statement(arrow: Arrow, columns: tuple[str, ...]) -> Hot:
    sources: list[ColumnElement[Any]] = [literal_column(f"'{status}'") for status in sorted(arrow.source)]
    values = (
        {"status": arrow.target, "updated_at": utc_now()}
        | _CONSEQUENCES.get(arrow, {})
        | {column: bindparam(f"set_{column}") for column in columns}
    )
    guards = []
    if arrow.source <= OWNED:
        guards.append(jobs.c.worker_id.is_not_distinct_from(bindparam("owner", type_=String)))
    if arrow.source == OWNED and arrow is not job_rules.STOP:
        # After a cancel no attempt may report anything but that it has stopped.
        guards.append(jobs.c.cancel_requested_at.is_(None))
    return Hot(
        lambda ids: (
            by_key(update(jobs))
            .where(
                jobs.c.job_id.in_(ids),
                unled(jobs.c.status).in_(sources),
                jobs.c.attempt == bindparam("owned_attempt"),
                *guards,
            )
            .values(values)
        )
    )


#: The latest start that meets a deadline which still counts. It stands in `start_by` while a job may be announced, and
#: only then: whoever looks for urgent jobs must not read past those that wait for something else.
LATEST_START = earlier(jobs.c.expires_at, func.coalesce(jobs.c.expected_duration_sec, 0.0))

#: Columns that always change with an arrow, beside the status.
_UNOWNED = {
    "worker_id": None,
    "lease_token": None,
    "held_caps": None,
    "published_at": None,
    "progress": None,
    "progress_note": None,
}
_ENDED = {
    "finished_at": utc_now(),
    "lease_token": None,
    "held_caps": None,
    "expires_at": None,
    # Its start may never have been written by itself: then it ended within moments of the claim.
    "started_at": func.coalesce(jobs.c.started_at, jobs.c.claimed_at),
}
_LATER = bindparam("delay_s", type_=Float) > 0
_DUE = {
    "queued": case((_LATER, Queued.DELAYED), else_=Queued.READY),
    "not_before": case((_LATER, utc_shift(bindparam("delay_s", type_=Float))), else_=None),
    "start_by": case((_LATER, None), else_=LATEST_START),
}
_WITHDRAWN = {
    "queued": None,
    "not_before": None,
    "blocked_on": None,
    "start_by": None,
    "expires_at": None,
    "finished_at": utc_now(),
}
# The fencing attempt goes on counting; what is charged begins anew. The deadline is the operator's now.
_ANEW = (
    _UNOWNED
    | _DUE
    | {
        "attempts": 0,
        "crashes": 0,
        "redrives": jobs.c.redrives + 1,
        "ready_at": None,
        "claimed_at": None,
        "started_at": None,
        "finished_at": None,
        "cancel_requested_at": None,
        "wait_reason": None,
    }
)
_CONSEQUENCES: dict[Arrow, dict[str, Any]] = {
    job_rules.CLAIM: {
        "attempt": jobs.c.attempt + 1,
        # Written out by the caller: MariaDB would already see the new attempt here, SQLite the old one.
        "lease_token": case(
            (
                bindparam("leased", type_=Boolean),
                literal(JOB_LEASE) + jobs.c.job_id + bindparam("lease_end", type_=String),
            ),
            else_=None,
        ),
        "attempts": jobs.c.attempts + 1,
        "queued": None,
        "start_by": None,
        "claimed_at": utc_now(),
        "started_at": None,
        "wait_reason": None,
    },
    job_rules.START: {"started_at": utc_now()},
    job_rules.FINISH: _ENDED,
    job_rules.SKIP: _ENDED,
    job_rules.FAIL: _ENDED,
    job_rules.BURY: _ENDED,
    job_rules.RETRY: _UNOWNED | _DUE,
    job_rules.HAND_BACK: _UNOWNED | _DUE | {"attempts": jobs.c.attempts - 1},
    job_rules.STOP: _ENDED,
    job_rules.DEFER: {"published_at": None} | _DUE,
    job_rules.CANCEL: _WITHDRAWN | {"cancel_requested_at": utc_now()},
    job_rules.EXPIRE: _WITHDRAWN,
    job_rules.REDRIVE: _ANEW,
    job_rules.RERUN: _ANEW,
}


def move(
    conn: Connection, arrow: Arrow, attempt: int, job_ids: Sequence[str], *, followed: bool = False, **values: Any
) -> int:
    """Move jobs along one arrow while they are where it starts and `attempt` is still theirs; how many moved.

    To its end a job goes only through `followers.end`, which sees to those that wait for it (`followed`).
    Three values are no columns: `delay_s` says when the job is due again, `leased` that a claim comes with a lease,
    `owner` who must own a job that is owned.
    """
    assert followed or arrow.target not in TERMINAL, "somebody may wait for it: use followers.end"
    extra: dict[str, Any] = {name: values.pop(name) for name in ("delay_s", "leased", "owner") if name in values}
    if "leased" in extra:
        extra["lease_end"] = f":{attempt + 1}"
    statement = _statement(arrow, tuple(sorted(values)))
    given = {f"set_{column}": value for column, value in values.items()}
    return statement.run(conn, job_ids, owned_attempt=attempt, **given, **extra)


class Attempt(Protocol):
    """Anything that names a job and the attempt that owns it."""

    @property
    def job_id(self) -> str: ...

    @property
    def attempt(self) -> int: ...


def by_attempt(attempts: Sequence[Attempt]) -> list[tuple[int, list[str]]]:
    """Grouped, because one UPDATE is guarded by one attempt; nearly always there is one group."""
    ordered = sorted(attempts, key=lambda row: row.attempt)
    return [(attempt, [row.job_id for row in group]) for attempt, group in groupby(ordered, lambda row: row.attempt)]


def job_event(arrow: Arrow, job_id: str, attempt: int, by: Claimant, details: dict[str, Any] | None) -> audit.Event:
    assert arrow.event is not None, "only deferring has no event, and nobody records it"
    return audit.Event(
        arrow.event,
        job_id=job_id,
        attempt=attempt,
        worker_id=by.worker_id,
        pool_id=by.pool_id,
        details=details,
    )
