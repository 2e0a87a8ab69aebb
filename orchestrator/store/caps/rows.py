"""The rows of capped keys: how many sit there. They are always locked in order of their keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, ScalarSelect, bindparam, select, update

from orchestrator.policies import WAITS_FOR_CAP
from orchestrator.store.dialect import by_key, upsert
from orchestrator.store.held import held
from orchestrator.store.hot import Hot
from orchestrator.store.schema import concurrency_caps, jobs


def _first_waiting() -> ScalarSelect[str]:
    """NULL when nobody waits for a row's key."""
    first = select(jobs.c.blocked_on).where(jobs.c.blocked_on == WAITS_FOR_CAP + concurrency_caps.c.cap_key).limit(1)
    return first.correlate(concurrency_caps).scalar_subquery()


_KEYS = select(concurrency_caps.c.cap_key)
_IN_USE = select(concurrency_caps.c.cap_key, concurrency_caps.c.in_use)
_LOOK = Hot(lambda keys: by_key(_IN_USE.where(concurrency_caps.c.cap_key.in_(keys)), concurrency_caps))
_IN_ORDER = _IN_USE.order_by(concurrency_caps.c.cap_key)
_WAITED = Hot(
    lambda keys: by_key(
        _IN_USE.where(concurrency_caps.c.cap_key.in_(keys), _first_waiting().is_not(None)), concurrency_caps
    )
)
_LOCK = Hot(
    lambda keys: by_key(_IN_ORDER.where(concurrency_caps.c.cap_key.in_(keys)).with_for_update(), concurrency_caps)
)
_STAY = Hot(
    lambda keys: by_key(
        _IN_ORDER.where(concurrency_caps.c.cap_key.in_(keys)).with_for_update(read=True), concurrency_caps
    )
)
_CHANGE = Hot(
    lambda keys: (
        by_key(update(concurrency_caps))
        .where(
            concurrency_caps.c.cap_key.in_(keys),
            concurrency_caps.c.in_use + bindparam("change") >= 0,
            concurrency_caps.c.in_use + bindparam("change") <= bindparam("most"),
        )
        .values(in_use=concurrency_caps.c.in_use + bindparam("change"))
    )
)


def look(conn: Connection, keys: Collection[str]) -> dict[str, int]:
    """How many sit at those of these keys that have a row."""
    return _in_use(_LOOK, conn, keys)


def look_at_all(conn: Connection) -> dict[str, int]:
    return {key: in_use for key, in_use in conn.execute(_IN_USE)}  # noqa: C416 - a Row is no pair to mypy


def waited(conn: Connection, keys: Collection[str]) -> dict[str, int]:
    """Those of some keys that anybody waits for: one look into the index for each."""
    return _in_use(_WAITED, conn, keys)


def lock(conn: Connection, keys: Collection[str]) -> dict[str, int]:
    return _in_use(_LOCK, conn, keys)


def held_by_others(conn: Connection, keys: Collection[str]) -> set[str]:
    """Those of these whose rows somebody else holds; the others are locked."""
    some = by_key(_KEYS, concurrency_caps).where(concurrency_caps.c.cap_key.in_(sorted(keys)))
    return {key for (key,) in held(conn, some)}


def stay(conn: Connection, keys: Collection[str]) -> dict[str, int]:
    """Look, and let nobody give a seat back meanwhile; others may park as well."""
    return _in_use(_STAY, conn, keys)


def _in_use(statement: Hot, conn: Connection, keys: Collection[str]) -> dict[str, int]:
    return {key: in_use for key, in_use in statement.rows(conn, sorted(keys))} if keys else {}  # noqa: C416 - as above


class Crowd(NamedTuple):
    in_use: int
    #: Whether others wait for it.
    waited_for: bool


def crowds(conn: Connection, keys: Collection[str]) -> dict[str, Crowd]:
    found = _IN_USE.add_columns(_first_waiting().is_not(None).label("waiting")).where(
        concurrency_caps.c.cap_key.in_(sorted(keys))
    )
    known = {row.cap_key: Crowd(row.in_use, bool(row.waiting)) for row in conn.execute(by_key(found, concurrency_caps))}
    return {key: known.get(key, Crowd(0, False)) for key in keys}


def create(conn: Connection, keys: Sequence[str]) -> None:
    """Rows of keys at which nobody sat; one that somebody else creates at this moment stays as it is, and is locked."""
    rows = [{"cap_key": key, "in_use": 0} for key in keys]
    upsert(conn, concurrency_caps, rows, lambda _new: {"in_use": concurrency_caps.c.in_use})


def change(conn: Connection, keys: Sequence[str], by: int, most: int) -> None:
    """So many more, or fewer, sit at each of these keys, whose rows the caller has locked."""
    changed = _CHANGE.run(conn, keys, change=by, most=most)
    assert changed == len(keys), "rows are locked, nobody else can have changed them"
