"""What successful attempts added: one row in the transaction that ends them, whatever the number of their tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select, update

from orchestrator.store import audit, flows
from orchestrator.store.dialect import by_key
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import jobs, spawns, workflows
from orchestrator.workflows import new_workflow_id

if TYPE_CHECKING:
    from orchestrator.store.followers import Ended


def found(conn: Connection, one: Ended) -> Ended:
    """A job that was no task and added some: it becomes the first task of a workflow of its own."""
    workflow_id = new_workflow_id()
    agent = conn.execute(select(jobs.c.agent).where(jobs.c.job_id == one.job_id)).scalar_one()
    row = {"workflow_id": workflow_id, "agent": agent, "content_hash": "", "implicit": True, "total": 1}
    insert_rows(conn, workflows, [row])
    conn.execute(update(jobs).where(jobs.c.job_id == one.job_id).values(workflow_id=workflow_id))
    audit.record(conn, [flows.event("created", workflow_id, agent, by=one.job_id)])
    return one._replace(workflow_id=workflow_id)


def add(conn: Connection, ended: Sequence[Ended]) -> None:
    """From now on their staged tasks are to be made jobs (`spawning`), and they cannot run again."""
    rows = [
        {"job_id": one.job_id, "attempt": one.attempt, "workflow_id": one.workflow_id, "remaining": one.spawned}
        for one in ended
    ]
    insert_rows(conn, spawns, rows)
    own = by_key(update(jobs)).where(jobs.c.job_id.in_([one.job_id for one in ended]))
    conn.execute(own.values(spawned=True))
