"""Jobs that wait for something other than a slot: a cap with room, a gate that opens, a quiet hour, other tasks.

They stand outside of their lane's order, so that nobody reads past them however many there are; each names the one
thing it waits for, and whoever changes that thing lets the first of them go, in order of rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, func, literal_column, or_, select, update

from orchestrator.jobs import DUE, Queued
from orchestrator.store.dialect import by_key, utc_now, utc_shift, walking
from orchestrator.store.moves import LATEST_START
from orchestrator.store.schema import jobs

#: What a task waits for that needs others.
TASKS = "tasks"
#: Seconds after which a job that must meet the gates is due.
SOON_S = 0.001
#: It wants quiet or costs units: it meets the leader's gates as a job that becomes due does.
GATED = or_(jobs.c.constraints.is_not(None), jobs.c.cost_units > 0)

_PARKABLE: list[ColumnElement[str]] = [literal_column(f"'{queued}'") for queued in DUE]


class Waiter(NamedTuple):
    """One that waits, and what it shares with others; `concurrency_keys` is JSON."""

    job_id: str
    lane: str
    type: str
    agent: str
    model_id: str | None
    concurrency_keys: str | None
    cost_units: float | None
    #: JSON.
    constraints: str | None


def park(conn: Connection, job_ids: Sequence[str], on: str, reason: str) -> int:
    """Ready or announced → blocked; how many."""
    if not job_ids:
        return 0
    return conn.execute(
        by_key(update(jobs))
        .where(jobs.c.job_id.in_(job_ids), jobs.c.queued.in_(_PARKABLE))
        .values(queued=Queued.BLOCKED, blocked_on=on, wait_reason=reason[:255], published_at=None, start_by=None)
    ).rowcount


def first(conn: Connection, on: str, most: int) -> list[Waiter]:
    """The first that wait for this, in order of rank, without those that somebody has in hand; locked."""
    return [Waiter._make(row) for row in first_rows(conn, on, most, *[jobs.c[name] for name in Waiter._fields])]


def first_rows(conn: Connection, on: str, most: int, *columns: ColumnElement[Any]) -> Sequence[Row[Any]]:
    """The same, for those who want to know something else of them."""
    if most <= 0:
        return []
    waiting = walking(select(*columns), jobs, "ix_jobs_blocked").where(jobs.c.blocked_on == on)
    return conn.execute(waiting.order_by(jobs.c.rank).limit(most).with_for_update(skip_locked=True)).all()


def let_go(conn: Connection, job_ids: Sequence[str]) -> None:
    """Blocked → ready. Nudge their lanes after the commit."""
    if job_ids:
        waiting = by_key(update(jobs)).where(jobs.c.job_id.in_(job_ids), jobs.c.queued == Queued.BLOCKED)
        freed = {"blocked_on": None, "wait_reason": None, "start_by": LATEST_START, "ready_at": utc_now()}
        conn.execute(waiting.values(queued=Queued.READY, **freed))


def let_gated_go(conn: Connection, job_ids: Sequence[str]) -> None:
    """Blocked → delayed, for a moment: what is due then meets the gates."""
    if job_ids:
        waiting = by_key(update(jobs)).where(jobs.c.job_id.in_(job_ids), jobs.c.queued == Queued.BLOCKED)
        due = utc_shift(SOON_S)
        conn.execute(waiting.values(queued=Queued.DELAYED, blocked_on=None, wait_reason=None, not_before=due))


def wait_elsewhere(conn: Connection, job_ids: Sequence[str], on: str, reason: str) -> None:
    """They wait for something else from now on."""
    if not job_ids:
        return
    waiting = by_key(update(jobs)).where(jobs.c.job_id.in_(job_ids), jobs.c.queued == Queued.BLOCKED)
    conn.execute(waiting.values(blocked_on=on, wait_reason=reason[:255]))


def of_kind(kind: str) -> Select[Any]:
    """Jobs that wait for anything of a kind, which ends with a colon."""
    return select(jobs.c.blocked_on).where(jobs.c.blocked_on > kind, jobs.c.blocked_on < f"{kind[:-1]};")  # ; is next


def waited_for(conn: Connection, after: str = "", limit: int = 500, kind: str = "") -> list[str]:
    """What any job waits for, by name: one look into the index for each, however many jobs wait for it.

    All of one kind begin with the same word, and each is seen to by whoever knows of that kind.
    """
    after = max(after, kind)
    found: list[str] = []
    while len(found) < limit:
        following = conn.execute(select(func.min(jobs.c.blocked_on)).where(jobs.c.blocked_on > after)).scalar()
        if following is None or not following.startswith(kind):
            break
        found.append(following)
        after = following
    return found
