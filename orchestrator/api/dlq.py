"""/dlq: jobs that were given up. Look, start them over, or forget them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.bulk import Bulk, BulkRedrive, choose, in_batches, only_looked, start_over
from orchestrator.api.replies import Json
from orchestrator.names import PATTERN, Name
from orchestrator.store import dead_letters
from orchestrator.store.dead_letters import Filter, Removed

router = APIRouter(prefix="/dlq", tags=["dlq"])

#: Ids that one request may name, and bytes that suffice to name them.
MAX_IDS = 1000
BODY_LIMIT = 262_144

Reason = Annotated[str, Field(pattern=PATTERN, max_length=32)]


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    job_id: Name | None = None
    type: Name | None = None
    agent: Name | None = None
    pool_id: Name | None = None
    reason: Reason | None = None
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, max_length=512)

    def meant(self) -> Filter:
        named = () if self.job_id is None else (self.job_id,)
        return Filter(named, self.type, self.agent, self.pool_id, self.reason)


class FilterBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # An empty list would read as "none of them" and match all.
    job_ids: Annotated[list[Name], Field(min_length=1, max_length=MAX_IDS)] | None = None
    type: Name | None = None
    agent: Name | None = None
    pool_id: Name | None = None
    reason: Reason | None = None

    def meant(self) -> Filter:
        return Filter(tuple(self.job_ids or ()), self.type, self.agent, self.pool_id, self.reason)


class PurgeBody(Bulk):
    filter: FilterBody = Field(description="which letters; {} means all of them and must be said")


class RedriveBody(PurgeBody, BulkRedrive):
    pass


@router.get("")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """Latest first; `next_cursor` is null at the end, and only there.

    A page may have fewer rows than `limit`, or none, before that: with a filter it looks at two thousand letters.
    `total` counts those that match among the latest ten thousand; with `at_least` there are older ones.
    """
    wanted = query.meant()
    found, following = await api.read(lambda conn: dead_letters.page(conn, wanted, query.limit, query.cursor))
    total, at_least = await api.read(lambda conn: dead_letters.count(conn, wanted))
    return Json({"dead_letters": found, "total": total, "at_least": at_least, "next_cursor": following})


@router.post("/redrive", openapi_extra=documented(RedriveBody.model_json_schema()))
async def redrive(request: Request, api: Api) -> Json:
    """Start them over, oldest first, with their attempts uncharged; those at `redrive_max` stay (`exhausted`).

    With `rate` they all leave the dead letters now and become due one after the other, so many a second. `matched` and
    `exhausted` are counted up to 10000. With `job_ids`, `unknown` has those that are no dead letters.
    """
    body = await read_model(request, RedriveBody, BODY_LIMIT)
    look = partial(dead_letters.look, wanted=body.filter.meant())
    chosen = await choose(api, look, body.max, api.settings.redrive_max, body.filter.job_ids)
    return await start_over(api, chosen, body, dead_letters.redrive)


@router.post("/purge", openapi_extra=documented(PurgeBody.model_json_schema()))
async def purge(request: Request, api: Api) -> Json:
    """Forget them, oldest first: the jobs' rows go, their history in the audit trail stays.

    A job whose worker vanished stays while its GPU lease does; ask again in a minute. A workflow keeps its tasks.
    `matched` is counted up to 10000. With `job_ids`, `unknown` has those that are no dead letters.
    """
    body = await read_model(request, PurgeBody, BODY_LIMIT)
    look = partial(dead_letters.look, wanted=body.filter.meant())
    chosen = await choose(api, look, body.max, named=body.filter.job_ids)
    if body.dry_run:
        return only_looked(chosen, "purged")

    def forget(batch: Sequence[str], _first: int, conn: Any) -> Removed:
        return dead_letters.purge(conn, batch)

    purged = await in_batches(api, chosen.ids, forget)
    return Json(chosen.told() | {"purged": purged, "dry_run": False})
