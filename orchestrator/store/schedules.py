"""Schedules as rows: what operators wrote, when each fires next, and the firing itself.

A firing is one transaction: the job, the row's next time and the audit. Whoever fires makes the same id of the same
time, so a firing that is done again, by a leader that did not hear of its commit or by its successor, finds its job.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator import actors
from orchestrator.errors import InvalidInput, OrchestratorError, ScheduleNotFound
from orchestrator.jobs import NewJob
from orchestrator.schedules import Plan, ScheduleSpec, Timing, fire_id, plan
from orchestrator.store import audit
from orchestrator.store.database import Database
from orchestrator.store.dialect import by_key, clock, utc_now, walking
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import schedules
from orchestrator.store.submit import PERMANENT, Answer, Rules, Verdict, refusal, submit_within

log = logging.getLogger(__name__)

#: When a schedule is looked at again whose next time cannot be told.
LOOK_AGAIN = timedelta(hours=1)
_RHYTHM = ("cron", "every_seconds", "timezone")

#: Makes a job of a template and an id. Raises InvalidInput.
Make = Callable[[dict[str, Any], str], NewJob]


# ── operators ───────────────────────────────────────────────────────────────────────────────────────────────────


def put(conn: Connection, schedule_id: str, spec: ScheduleSpec) -> bool:
    """Write a schedule; whether it is new. The same again changes nothing; another rhythm begins now."""
    before = conn.execute(_one(schedule_id).with_for_update()).one_or_none()
    given = spec.model_dump() | {"job": json.dumps(spec.job)}
    if before is not None and all(_same(key, value, before) for key, value in given.items()):
        return False
    now = clock(conn)
    values = given | {"actor": actors.current(), "updated_at": now, "last_error": None}
    if before is None or not before.enabled or any(given[key] != getattr(before, key) for key in _RHYTHM):
        anchor = now.replace(microsecond=0)
        timing = Timing.of(spec.cron, spec.every_seconds, spec.timezone, anchor)
        values |= {"anchor_at": anchor, "next_fire_at": timing.after(now)}
    if not spec.enabled:
        values["next_fire_at"] = None
    if before is None:
        try:
            with conn.begin_nested():
                row = {"schedule_id": schedule_id} | values
                insert_rows(conn, schedules, [row], {"enabled": True, "timezone": "UTC"})
        except IntegrityError:
            return put(conn, schedule_id, spec)  # somebody else made it first, and has committed
    else:
        change = update(schedules).where(schedules.c.schedule_id == schedule_id)
        conn.execute(change.values(**values, version=schedules.c.version + 1))
    details = {"schedule_id": schedule_id, "after": spec.model_dump(exclude_unset=True)}
    audit.record(conn, [audit.Event("schedule.changed", details=details)])
    return before is None


def remove(conn: Connection, schedule_id: str) -> None:
    """Raises ScheduleNotFound. Jobs that it made stay."""
    if not conn.execute(delete(schedules).where(schedules.c.schedule_id == schedule_id)).rowcount:
        raise ScheduleNotFound(schedule_id)
    audit.record(conn, [audit.Event("schedule.deleted", details={"schedule_id": schedule_id})])


def get(conn: Connection, schedule_id: str) -> dict[str, Any]:
    """Raises ScheduleNotFound."""
    row = conn.execute(_one(schedule_id)).one_or_none()
    if row is None:
        raise ScheduleNotFound(schedule_id)
    return _readable(row)


def page(conn: Connection, after: str | None, limit: int) -> list[dict[str, Any]]:
    """By id."""
    found = select(schedules).where(schedules.c.schedule_id > (after or ""))
    return [_readable(row) for row in conn.execute(found.order_by(schedules.c.schedule_id).limit(limit))]


def fire_now(conn: Connection, db: Database, schedule_id: str, job: NewJob, rules: Rules) -> Answer:
    """Submit its job because somebody wants it now. An id that another inserts at this moment is `MetOthers`."""
    [answer] = submit_within(conn, db, [job], rules)
    if answer is Verdict.CREATED:
        details = {"schedule_id": schedule_id, "by_hand": True}
        audit.record(conn, [audit.Event("schedule.fired", job_id=job.job_id, details=details)])
    return answer


# ── the leader ──────────────────────────────────────────────────────────────────────────────────────────────────


def due(conn: Connection, limit: int) -> list[str]:
    """Schedules whose time has come, those that wait longest first."""
    found = walking(select(schedules.c.schedule_id), schedules, "ix_schedules_due")
    ready = found.where(schedules.c.next_fire_at <= utc_now())
    return list(conn.execute(ready.order_by(schedules.c.next_fire_at).limit(limit)).scalars())


@dataclass
class _Firing:
    """One schedule's part in it."""

    row: Row[Any]
    plan: Plan
    jobs: dict[datetime, NewJob]
    error: OrchestratorError | None = None

    def settle(self, answers: dict[str, Answer]) -> list[audit.Event]:
        """Hear what became of its jobs; what the audit says of it."""
        made, refused = [], 0
        for at, job in self.jobs.items():
            answer = answers[job.job_id]
            if answer is Verdict.CREATED:
                made.append((at, job))
            elif error := refusal(job, answer):
                refused += 1
                self.error = error
        events = [self._event("schedule.fired", job_id=job.job_id, at=f"{at.isoformat()}Z") for at, job in made]
        if self.waits:
            return events
        refused += len(self.plan.fires) - len(self.jobs)
        missed = None if self.plan.missed is None else self.plan.missed + refused
        if missed != 0 or self.error:
            reason = {"error": str(self.error)} if self.error else {"catch_up": self.row.catch_up}
            since = f"{self.row.next_fire_at.isoformat()}Z"
            events.append(self._event("schedule.missed", missed=missed, since=since, **reason))
        return events

    @property
    def waits(self) -> bool:
        """Told to come later: it is due, and tried again, until its job is let in or its time is too long ago."""
        return self.error is not None and not isinstance(self.error, PERMANENT)

    def values(self, answers: dict[str, Answer]) -> dict[str, Any]:
        values: dict[str, Any] = {"last_error": str(self.error)[:1000] if self.error else None}
        if not self.waits:
            values["next_fire_at"] = self.plan.next_at
        stored = [(at, job) for at, job in self.jobs.items() if not refusal(job, answers[job.job_id])]
        if stored:
            at, job = stored[-1]
            values |= {"last_fired_at": at, "last_job_id": job.job_id}
        if not self.plan.fires and not self.error:
            del values["last_error"]  # nothing was tried
        return values

    def _event(self, name: str, job_id: str | None = None, **details: Any) -> audit.Event:
        return audit.Event(name, job_id=job_id, details={"schedule_id": self.row.schedule_id} | details)


def fire(conn: Connection, db: Database, schedule_ids: Sequence[str], make: Make, rules: Rules) -> list[NewJob]:
    """Fire those of these that are still due: their jobs, their next times and the audit, or nothing of it.

    Answers with the jobs that are new. A row that an operator changes at this moment is left for the next look.
    """
    rows = conn.execute(
        by_key(select(schedules), schedules)
        .where(schedules.c.schedule_id.in_(schedule_ids), schedules.c.next_fire_at <= utc_now())
        .order_by(schedules.c.schedule_id)
        .with_for_update(skip_locked=True)
    ).all()
    if not rows:
        return []
    now = clock(conn)
    firings = [_firing(row, now, make) for row in rows]
    jobs = [job for firing in firings for job in firing.jobs.values()]
    verdicts = submit_within(conn, db, jobs, rules)
    answers = {job.job_id: answer for job, answer in zip(jobs, verdicts, strict=True)}
    events = []
    for firing in firings:
        events += firing.settle(answers)
        _write(conn, firing.row.schedule_id, firing.values(answers))
    audit.record(conn, events)
    return [job for job in jobs if answers[job.job_id] is Verdict.CREATED]


def pass_over(conn: Connection, schedule_id: str, why: str) -> None:
    """A firing that breaks whatever is done with: the schedule goes on to its next time, and says so."""
    row = conn.execute(_one(schedule_id).with_for_update()).one_or_none()
    if row is not None and row.next_fire_at is not None:
        now = clock(conn)
        try:
            planned = _plan(row, now)[0]
        except Exception:  # this is what breaks
            log.exception("a schedule cannot be planned", extra={"schedule_id": schedule_id})
            planned = _later(now)
        firing = _Firing(row, planned, {}, InvalidInput(why))
        audit.record(conn, firing.settle({}))
        _write(conn, schedule_id, firing.values({}))


def _firing(row: Row[Any], now: datetime, make: Make) -> _Firing:
    planned, wrong = _plan(row, now)
    if wrong is not None:
        log.error("a schedule cannot be planned", extra={"schedule_id": row.schedule_id, "error": str(wrong)})
    jobs = {}
    try:
        template = json.loads(row.job)
        jobs = {at: make(template, fire_id(row.schedule_id, at)) for at in planned.fires}
    except InvalidInput as refused:  # what was allowed once is not any more
        wrong = refused
    return _Firing(row, planned, jobs, wrong)


def _plan(row: Row[Any], now: datetime) -> tuple[Plan, OrchestratorError | None]:
    try:
        timing = Timing.of(row.cron, row.every_seconds, row.timezone, row.anchor_at)
    except InvalidInput as wrong:  # this machine has no such time zone, or somebody edited the row
        return _later(now), wrong
    return plan(timing, row.catch_up, row.catch_up_max, row.next_fire_at, now), None


def _later(now: datetime) -> Plan:
    return Plan((), 1, now + LOOK_AGAIN)


def _write(conn: Connection, schedule_id: str, values: dict[str, Any]) -> None:
    conn.execute(update(schedules).where(schedules.c.schedule_id == schedule_id).values(**values))


def _one(schedule_id: str) -> Any:
    return select(schedules).where(schedules.c.schedule_id == schedule_id)


def _same(key: str, value: Any, row: Row[Any]) -> bool:
    kept = getattr(row, key)
    return bool(json.loads(kept) == json.loads(value) if key == "job" else kept == value)


def _readable(row: Row[Any]) -> dict[str, Any]:
    return row._asdict() | {"job": json.loads(row.job)}
