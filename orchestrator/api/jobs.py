"""GET /jobs…: one record, its result, its history, why it waits, and pages of records."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.ids import JobId
from orchestrator.api.replies import Json
from orchestrator.api.waiters import unless_gone
from orchestrator.explanation import Facts, as_document
from orchestrator.explanation import explain as explain_job
from orchestrator.jobs import Status
from orchestrator.names import Name
from orchestrator.store import audit, explanation, job_reads
from orchestrator.store.job_reads import Filter

router = APIRouter(prefix="/jobs", tags=["jobs"])


class OneQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds to wait for the job to end")


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    status: Status | None = None
    agent: Name | None = None
    pool_id: Name | None = None
    type: Name | None = None
    workflow_id: Name | None = None
    tag: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="one of its tags, exactly as it was submitted"
    )
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, max_length=512)


class EventsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: int = Field(0, ge=0, lt=2**63, description="id of the last event already seen")
    limit: int = Field(1000, ge=1, le=1000)


@router.get("")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """Newest first, without payloads. `next_cursor` is null at the end, and only there.

    A page may have fewer rows than `limit`, or none, before that: it looks at two thousand jobs at most where no index
    leads to those that are wanted, such as all of a type, a pool or a tag.
    """
    wanted = Filter(query.status, query.agent, query.pool_id, query.type, query.workflow_id, query.tag)
    found, following = await api.read(lambda conn: job_reads.page(conn, wanted, query.limit, query.cursor))
    return Json({"jobs": found, "next_cursor": following})


@router.get("/stats")
async def stats(api: Api) -> Json:
    """How many jobs there are, by status, pool and agent. Of a status in `at_least` only so many were counted."""
    return Json(await api.stats.answer())


@router.get("/{job_id}")
async def get(request: Request, api: Api, job_id: JobId, query: Annotated[OneQuery, Query()]) -> Json:
    """The whole record. With `wait`, once the job has ended or that many seconds are over."""
    if query.wait:
        await unless_gone(request, api.waiters.wait(frozenset({job_id}), min(query.wait, api.settings.wait_max_s)))
    return Json(await api.read(lambda conn: job_reads.get(conn, job_id)))


@router.get("/{job_id}/result")
async def result(api: Api, job_id: JobId) -> Json:
    """What the job returned; 409 while it has not ended, 404 when it ended without a result."""
    found = await api.read(lambda conn: job_reads.result(conn, job_id))
    return Json({"job_id": job_id, "status": Status.DONE} | found)


@router.get("/{job_id}/explain")
async def explain(api: Api, job_id: JobId) -> Json:
    """Why the job does not run: one reason, what it rests on, its place in line and when it may start."""
    orchestrator = api.orchestrator

    def look(conn: Any) -> tuple[Facts, datetime]:
        return explanation.look(conn, job_id, orchestrator.policies.book(conn), orchestrator.terms)

    facts, now = await api.read(look)
    return Json(as_document(facts, explain_job(facts), now))


@router.get("/{job_id}/events")
async def events(api: Api, job_id: JobId, query: Annotated[EventsQuery, Query()]) -> Json:
    """Everything that happened to the job, oldest first."""
    found = await api.read(lambda conn: audit.of_job(conn, job_id, query.after, query.limit))
    if not found:
        await api.read(lambda conn: job_reads.status(conn, job_id))
    return Json({"events": found})
