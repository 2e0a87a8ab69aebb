"""The results of what a task needed: in order, a page at a time, so that nobody holds a hundred thousand of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, select

from orchestrator.store.schema import jobs, results, task_edges

#: Results to a page at most, and characters: one that is longer is a page by itself.
PAGE, MAX_CHARACTERS = 256, 1_000_000


class Input(NamedTuple):
    position: int
    job_id: str
    #: Its name in the workflow; None for one that a task added.
    name: str | None
    status: str
    #: JSON; None where it has none: skipped, or failed although others go on without it.
    result: str | None

    def document(self) -> dict[str, Any]:
        return self._asdict() | {"result": None if self.result is None else json.loads(self.result)}


class Page(NamedTuple):
    inputs: list[Input]
    #: Whether more follow the last of these.
    more: bool


def page(conn: Connection, job_id: str, after: int = -1, name: str | None = None) -> Page:
    """What follows that position; with `name`, that of this task alone."""
    beside = task_edges.outerjoin(jobs, jobs.c.job_id == task_edges.c.needs_id).outerjoin(
        results, results.c.job_id == task_edges.c.needs_id
    )
    columns = (task_edges.c.position, task_edges.c.needs_id, jobs.c.task, jobs.c.status)
    wanted = [task_edges.c.task_id == job_id, task_edges.c.position > after]
    if name is not None:
        wanted.append(jobs.c.task == name)
    sizes = select(*columns, func.length(results.c.result).label("size")).select_from(beside).where(*wanted)
    found = conn.execute(sizes.order_by(task_edges.c.position).limit(PAGE + 1)).all()
    shown = _fitting(found)
    texts = _texts(conn, [row.needs_id for row in shown if row.size is not None])
    inputs = [
        Input(row.position, row.needs_id, row.task, row.status or "purged", texts.get(row.needs_id)) for row in shown
    ]
    return Page(inputs, len(found) > len(shown))


def _fitting(found: Any) -> list[Row[Any]]:
    shown: list[Row[Any]] = []
    size = 0
    for row in found[:PAGE]:
        size += row.size or 0
        if shown and size > MAX_CHARACTERS:
            break
        shown.append(row)
    return shown


def _texts(conn: Connection, job_ids: list[str]) -> dict[str, str]:
    if not job_ids:
        return {}
    found = select(results.c.job_id, results.c.result).where(results.c.job_id.in_(job_ids))
    return {row.job_id: row.result for row in conn.execute(found)}
