"""Every difference between MariaDB and SQLite; nowhere else is there one.

Elsewhere in the store the same statements run on both. A difference is a construct that compiles per database
(`utc_now`, `utc_shift`) or a method of `Dialect`, never a condition at the place of use.

Statements are made of `columns` (types), `moments` (the clock), `functions`, `hints` (what planners are told),
`literals` (values in their text) and `upserts`. `contract` is what the store asks of a database beside those;
`mariadb` (by its `driver`) and `sqlite` are the two that answer, and `urls` chooses. `checks` is for migrations alone.
"""

from orchestrator.store.dialect.columns import TABLE_OPTIONS, CountingId, LongText, UtcDateTime
from orchestrator.store.dialect.contract import LeaderLock
from orchestrator.store.dialect.functions import json_field, json_has, largest
from orchestrator.store.dialect.hints import by_key, in_order, unled, walking
from orchestrator.store.dialect.literals import largest_statement, mark, writer
from orchestrator.store.dialect.moments import clock, earlier, seconds_between, seconds_since, utc_now, utc_shift
from orchestrator.store.dialect.upserts import upsert, upsert_returning
from orchestrator.store.dialect.urls import SCRATCH, dialect_of, file_of, missing_file, scratch_url

__all__ = [
    "SCRATCH",
    "TABLE_OPTIONS",
    "CountingId",
    "LeaderLock",
    "LongText",
    "UtcDateTime",
    "by_key",
    "clock",
    "dialect_of",
    "earlier",
    "file_of",
    "in_order",
    "json_field",
    "json_has",
    "largest",
    "largest_statement",
    "mark",
    "missing_file",
    "scratch_url",
    "seconds_between",
    "seconds_since",
    "unled",
    "upsert",
    "upsert_returning",
    "utc_now",
    "utc_shift",
    "walking",
    "writer",
]
