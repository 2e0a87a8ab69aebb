"""What the rows of jobs say about caps: which keys they have, and at which of them they sit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, case, select, update

from orchestrator.jobs import OWNED
from orchestrator.jsontext import listed
from orchestrator.store.dialect import by_key
from orchestrator.store.hot import Hot, among
from orchestrator.store.schema import jobs

_COLUMNS = (
    jobs.c.job_id,
    jobs.c.type,
    jobs.c.agent,
    jobs.c.model_id,
    jobs.c.concurrency_keys,
    jobs.c.lane,
    jobs.c.held_caps,
)
_BY_ID = Hot(lambda ids: by_key(select(*_COLUMNS).where(jobs.c.job_id.in_(ids)), jobs))
_OWNED = select(*_COLUMNS).where(jobs.c.status.in_(sorted(OWNED)))
_LOCKED = Hot(
    lambda ids: by_key(
        select(*_COLUMNS).where(jobs.c.job_id.in_(ids), among(jobs.c.status, OWNED)).with_for_update(skip_locked=True),
        jobs,
    )
)
SEATED = select(jobs.c.held_caps).where(among(jobs.c.status, OWNED), jobs.c.held_caps.is_not(None))


class JobKeys(NamedTuple):
    job_id: str
    type: str
    agent: str
    model_id: str | None
    concurrency_keys: str | None
    lane: str
    held_caps: str | None

    @property
    def held(self) -> list[str]:
        return listed(self.held_caps)


def of_jobs(conn: Connection, job_ids: Sequence[str]) -> Iterator[JobKeys]:
    return (JobKeys(*row) for row in _BY_ID.rows(conn, job_ids))


def of_owned(conn: Connection) -> Iterator[JobKeys]:
    return (JobKeys(*row) for row in conn.execute(_OWNED))


def lock_owned(conn: Connection, job_ids: Sequence[str]) -> Iterator[JobKeys]:
    """Those of these that are owned and whose rows nobody else holds, locked."""
    return (JobKeys(*row) for row in _LOCKED.rows(conn, job_ids))


def count(conn: Connection) -> Counter[str]:
    """By key, how many sit there by the word of the jobs themselves."""
    return Counter(key for text in conn.execute(SEATED).scalars() for key in listed(text))


def remember(conn: Connection, held: Mapping[str, Sequence[str]]) -> None:
    """Write down which keys these jobs are seated at; those that are seated nowhere may be left out."""
    texts = {job_id: json.dumps(keys) for job_id, keys in held.items() if keys}
    if texts:
        change = by_key(update(jobs)).where(jobs.c.job_id.in_(sorted(texts)))
        conn.execute(change.values(held_caps=case(texts, value=jobs.c.job_id)))
