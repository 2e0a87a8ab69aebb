"""GET /audit: everything that happened, in pages, or from some moment on."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.replies import Json
from orchestrator.errors import InvalidInput
from orchestrator.names import Name
from orchestrator.store import audit
from orchestrator.store.audit import Filter

router = APIRouter(tags=["audit"])

_Id = Annotated[int, Field(ge=0, lt=2**63)]


class AuditQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    event_type: Annotated[str, Field(pattern=r"^[a-z_]+(\.[a-z_]+)*(\.\*)?$", max_length=128)] | None = Field(
        None, description="such as job.done; job.* means all that begin like that"
    )
    job_id: Name | None = None
    pool_id: Name | None = None
    worker_id: Name | None = None
    actor: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    limit: int = Field(100, ge=1, le=1000)
    cursor: _Id | None = Field(None, description="the next_cursor of an earlier page")
    after: _Id | None = Field(None, description="oldest first, what came after this id: the next_after of an answer")

    def wanted(self) -> Filter:
        return Filter(self.event_type, self.job_id, self.pool_id, self.worker_id, self.actor)


@router.get("/audit")
async def page(api: Api, query: Annotated[AuditQuery, Query()]) -> Json:
    """Newest first; `next_cursor` is null at the end, and a page may be short, or empty, before that.

    With `after`: oldest first, and `next_after` is what to ask for next. A row that waits for the end of a transaction
    which began before it is told some seconds late; none is left out.
    """
    if query.after is not None:
        return await _since(api, query, query.after)
    # Asked before the page: what comes meanwhile is told again rather than never.
    complete = await api.read(audit.settled_id)
    found, following = await api.read(lambda conn: audit.page(conn, query.wanted(), query.limit, query.cursor))
    return Json({"events": found, "next_cursor": following, "next_after": complete})


async def _since(api: Api, query: AuditQuery, after: int) -> Json:
    if query.cursor is not None:
        raise InvalidInput("cursor: goes back, after goes on; give one of them", "cursor")
    found, following = await api.read(lambda conn: audit.since(conn, query.wanted(), query.limit, after))
    return Json({"events": found, "next_cursor": None, "next_after": following})
