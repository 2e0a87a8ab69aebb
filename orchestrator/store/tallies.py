"""Totals of what happened to jobs, counted from the audit trail: each event once, whoever leads, whatever restarts.

`fold` reads what is new along the ids, adds it to the totals and moves the cursor, in one transaction of the leader.
Ids are given out before their transaction commits, so some may be missing for a while. Nobody waits for them: what is
there is counted, the holes are remembered with the cursor, and each fold looks into them again until they are old.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Integer,
    Select,
    Subquery,
    and_,
    bindparam,
    case,
    func,
    insert,
    literal,
    or_,
    select,
    type_coerce,
    update,
)

from orchestrator import tallies as rules
from orchestrator.store.dialect import clock, json_field, largest, seconds_between, seconds_since, upsert, walking
from orchestrator.store.hot import Hot, Listed, among, some_at_a_time
from orchestrator.store.schema import audit, jobs, results, tallies, tally_cursor
from orchestrator.tallies import BOUNDS, SUBMITS, Group, Hole, Ids, Times, Totals

#: Events that one fold counts: about a tenth of a second of the leader's time.
BATCH = 10_000
#: Ranges of ids that one statement names.
MANY_RANGES = 100
#: Totals that one statement writes.
MANY_TOTALS = 500

_CURSOR = "audit"


class Cursor(NamedTuple):
    position: int = 0
    holes: tuple[Hole, ...] = ()


def fold(conn: Connection, most: int = BATCH) -> int:
    """Count up to `most` new events, and those that came late; how many."""
    cursor = _cursor(conn, locked=True)
    now = clock(conn).replace(tzinfo=UTC).timestamp()
    late = [ids for part in some_at_a_time(cursor.holes, MANY_RANGES) for ids in _present(conn, _within(part), most)]
    new = _present(conn, audit.c.id > cursor.position, most)
    _add(conn, [*late, *new])
    # A trail that is shorter than what was counted was cut off by hand, and goes on from there.
    position = new[-1].last if new else min(cursor.position, _newest(conn))
    holes = rules.still_missing(cursor.holes, cursor.position, late, new, now)
    _move(conn, cursor, Cursor(position, tuple(holes)))
    return sum(ids.many for ids in (*late, *new))


def waiting(conn: Connection) -> bool:
    """Whether a fold would find anything to do."""
    cursor = _cursor(conn)
    return bool(cursor.holes) or _newest(conn) != cursor.position


def lag_s(conn: Connection) -> float:
    """Age of the oldest event behind the cursor; 0 when all are counted."""
    uncounted = select(seconds_since(audit.c.ts)).where(audit.c.id > _cursor(conn).position)
    age = conn.execute(walking(uncounted, audit, "PRIMARY").order_by(audit.c.id).limit(1)).scalar()
    return 0.0 if age is None else max(float(age), 0.0)


def totals(conn: Connection) -> Totals:
    """All of them. Their labels are our own words, so the database joins those of a type: a tenth of the rows."""
    found: Totals = {}
    for name, type, joined in _TOTALS.rows(conn):
        for part in joined.split(","):
            label, _, value = part.partition("=")
            found[name, type, label] = float(value)
    return found


_LABELLED = func.group_concat(tallies.c.label.concat("=").concat(tallies.c.value))
_TOTALS = Hot(lambda _ids: select(tallies.c.name, tallies.c.type, _LABELLED).group_by(tallies.c.name, tallies.c.type))


def folded_up_to(conn: Connection) -> int:
    """The id up to which all is counted and nothing is missing that may still come: so far the trail may be deleted.

    It is always less than the last id that was counted. A database that has no row left might begin at 1 again.
    """
    cursor = _cursor(conn)
    return max(min([cursor.position, *(hole.first for hole in cursor.holes)]) - 1, 0)


# ── the cursor ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _cursor(conn: Connection, *, locked: bool = False) -> Cursor:
    query = select(tally_cursor.c.position, tally_cursor.c.holes).where(tally_cursor.c.name == _CURSOR)
    row = conn.execute(query.with_for_update() if locked else query).one_or_none()
    if row is None and locked:
        # What was deleted before anybody counted is no hole.
        cursor = Cursor(max((conn.execute(select(func.min(audit.c.id))).scalar() or 1) - 1, 0))
        conn.execute(insert(tally_cursor), {"name": _CURSOR, "position": cursor.position, "holes": "[]"})
        return cursor
    return Cursor() if row is None else Cursor(row.position, tuple(Hole(*hole) for hole in json.loads(row.holes)))


def _move(conn: Connection, before: Cursor, after: Cursor) -> None:
    if after != before:
        values = {"position": after.position, "holes": json.dumps(after.holes)}
        conn.execute(update(tally_cursor).where(tally_cursor.c.name == _CURSOR).values(values))


def _newest(conn: Connection) -> int:
    return int(conn.execute(select(func.coalesce(func.max(audit.c.id), 0))).scalar_one())


# ── which ids are there ─────────────────────────────────────────────────────────────────────────────────────────────


def _within(ranges: Sequence[Hole]) -> ColumnElement[bool]:
    return or_(*[audit.c.id.between(ids.first, ids.last) for ids in ranges])


def _present(conn: Connection, condition: ColumnElement[bool], most: int) -> list[Ids]:
    """The first ids for which this holds, as ranges without a gap.

    What is found is counted by another statement, which may see more. It counts these ranges and nothing else: in
    them every id is there already.
    """
    first = walking(select(audit.c.id).where(condition), audit, "PRIMARY").order_by(audit.c.id).limit(most).subquery()
    run = (first.c.id - func.row_number().over(order_by=first.c.id)).label("run")
    numbered = select(first.c.id, run).subquery()
    ends = select(func.min(numbered.c.id), func.max(numbered.c.id)).group_by(numbered.c.run)
    return [Ids(*row) for row in conn.execute(ends.order_by(func.min(numbered.c.id)))]


# ── what they add ───────────────────────────────────────────────────────────────────────────────────────────────────


def _add(conn: Connection, found: Sequence[Ids]) -> None:
    groups = [group for part in some_at_a_time(found, MANY_RANGES) for group in _groups(conn, part)]
    known = conn.execute(select(tallies.c.type).where(tallies.c.name == SUBMITS)).scalars() if groups else ()
    added = rules.additions(groups, set(known))
    rows = [
        dict(zip(("name", "type", "label", "value"), (*key, value), strict=True))
        for key, value in sorted(added.items())
    ]
    for some in some_at_a_time(rows, MANY_TOTALS):
        upsert(conn, tallies, some, lambda new: {"value": tallies.c.value + new.value})


def _groups(conn: Connection, ranges: Sequence[Ids]) -> list[Group]:
    ends = [end for ids in ranges for end in (ids.first, ids.last)]
    return [_group(*row) for row in _GROUPED.rows(conn, ends, most=sum(ids.last - ids.first + 1 for ids in ranges))]


def _grouped(ends: Listed) -> Select[Any]:
    each = _measured(ends)
    keys = (each.c.event_type, each.c.type, each.c.kind, each.c.reclaimed)
    times = (each.c.latency, each.c.wait, each.c.run)
    buckets = [_bucket(seconds).label(f"{seconds.name}_bucket") for seconds in times]
    sums = [func.sum(seconds) for seconds in times]
    return select(*keys, func.count(), func.min(each.c.id), *buckets, *sums).group_by(*keys, *buckets)


#: Of ranges of ids, by their ends. To write it takes longer than the database takes to answer.
_GROUPED = Hot(_grouped)


def _group(
    event: str, type: str | None, kind: str | None, reclaimed: int, count: int, first_id: int, *times: Any
) -> Group:
    buckets, sums = times[:3], times[3:]
    latency, wait, run = [
        Times(bucket, None if total is None else float(total)) for bucket, total in zip(buckets, sums, strict=True)
    ]
    return Group(event, type, kind, bool(reclaimed), count, first_id, latency, wait, run)


def _bucket(seconds: ColumnElement[Any]) -> ColumnElement[Any]:
    return case(
        (seconds.is_(None), None), *[(seconds <= bound, n) for n, bound in enumerate(BOUNDS)], else_=len(BOUNDS)
    )


_before = audit.alias("before")
_SAME_JOB = and_(_before.c.job_id == audit.c.job_id, _before.c.id < audit.c.id)
_STARTED_OVER = select(func.max(_before.c.ts)).where(_SAME_JOB, among(_before.c.event_type, rules.ANEW))


def _measured(ends: Listed) -> Subquery:
    """These events, one by one: whose they are, why, and how long what ended with each of them took."""
    event = audit.c.event_type
    times = {"latency": _latency(event), "wait": _wait(event), "run": _run(event)}
    both = audit.outerjoin(jobs, jobs.c.job_id == audit.c.job_id).outerjoin(
        results,
        and_(event == rules.DONE, results.c.job_id == audit.c.job_id, results.c.attempt == audit.c.attempt),
    )
    query = select(
        audit.c.id,
        event,
        jobs.c.type,
        case((event == rules.RETRY, json_field(audit.c.details, "kind"))).label("kind"),
        case(
            (among(event, rules.OUTCOMES), json_field(audit.c.details, "reclaimed").is_not(None)), else_=literal(0)
        ).label("reclaimed"),
        *[largest(seconds, literal(0.0)).label(name) for name, seconds in times.items()],
    ).select_from(both)
    within = or_(*[audit.c.id.between(first, last) for first, last in zip(ends[::2], ends[1::2], strict=True)])
    rows = walking(query, audit, "PRIMARY").where(within, among(event, rules.EVENTS))
    # The limit keeps the planner from working out each of these again for every bucket that they are compared with.
    return rows.limit(bindparam("most", type_=Integer)).subquery()


def _latency(event: ColumnElement[str]) -> ColumnElement[Any]:
    """From its submit, or from when it was last started over, to its end."""
    began = case(
        (jobs.c.redrives > 0, func.coalesce(_STARTED_OVER.scalar_subquery(), jobs.c.created_at)),
        else_=jobs.c.created_at,
    )
    return case((among(event, rules.ENDS), seconds_between(began, audit.c.ts)))


def _wait(event: ColumnElement[str]) -> ColumnElement[Any]:
    """From when it could have started to its first claim, and to the first after it was started over."""
    submitted = select(json_field(_before.c.details, "not_before")).where(
        _SAME_JOB, _before.c.event_type == rules.SUBMITTED
    )
    seen = case((jobs.c.ready_at <= audit.c.ts, jobs.c.ready_at))
    # A task was let go by those it needed: if it became ready once more since, nobody knows when that was.
    due = case(
        (jobs.c.ready_at.is_(None), jobs.c.created_at),
        (jobs.c.needs > 0, seen),
        else_=func.coalesce(submitted.limit(1).scalar_subquery(), jobs.c.created_at),
    )
    anew = _STARTED_OVER.where(_before.c.attempt == audit.c.attempt - 1).scalar_subquery()
    began = case((audit.c.attempt == 1, due), (jobs.c.redrives > 0, largest(anew, func.coalesce(seen, anew))))
    return case((event == rules.CLAIMED, seconds_between(began, audit.c.ts)))


def _run(event: ColumnElement[str]) -> ColumnElement[Any]:
    """What the worker measured; else from the start of this attempt to its end, if somebody saw that."""
    told = case(
        (event == rules.DONE, results.c.run_seconds),
        else_=type_coerce(json_field(audit.c.details, "run_seconds"), Float) + 0.0,
    )
    seen = and_(
        event != rules.CANCELLED, json_field(audit.c.details, "reclaimed").is_(None), jobs.c.attempt == audit.c.attempt
    )
    began = func.coalesce(jobs.c.started_at, jobs.c.claimed_at)
    run = case((told > 0, told), (seen, seconds_between(began, audit.c.ts)))
    return case((among(event, rules.RAN), run))
