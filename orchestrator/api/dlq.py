"""/dlq: jobs that were given up. Look, start them over, or forget them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api, Backend
from orchestrator.api.body import documented, read_model
from orchestrator.api.replies import Json
from orchestrator.names import PATTERN, Name
from orchestrator.store import dead_letters
from orchestrator.store.dead_letters import Filter, Removed

router = APIRouter(prefix="/dlq", tags=["dlq"])

#: Letters that one transaction moves.
BATCH = 500
#: Ids that a dry run shows.
SAMPLE = 10
#: Ids that one request may name, and bytes that suffice to name them.
MAX_IDS = 1000
BODY_LIMIT = 262_144

Reason = Annotated[str, Field(pattern=PATTERN, max_length=32)]

#: (ids, place of the first of them among all, connection) → what left.
Work = Callable[[Sequence[str], int, Any], Removed]


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


class PurgeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    filter: FilterBody = Field(description="which letters; {} means all of them and must be said")
    dry_run: bool = Field(False, description="only tell how many match, and some of their ids")
    max: int = Field(1000, ge=1, le=10_000, description="at most so many, oldest first")


class RedriveBody(PurgeBody):
    # The lower end keeps the last of them within months, the upper one means "at once".
    rate: float | None = Field(
        None, ge=0.001, le=10_000, allow_inf_nan=False, description="jobs per second that become due; absent: all now"
    )


@router.get("")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """Latest first; `total` counts all that match, `next_cursor` is null at the end."""
    wanted = query.meant()
    found, following = await api.read(lambda conn: dead_letters.page(conn, wanted, query.limit, query.cursor))
    total = await api.read(lambda conn: dead_letters.count(conn, wanted))
    return Json({"dead_letters": found, "total": total, "next_cursor": following})


@router.post("/redrive", openapi_extra=documented(RedriveBody.model_json_schema()))
async def redrive(request: Request, api: Api) -> Json:
    """Start them over, oldest first, with their attempts uncharged; those at `redrive_max` stay (`exhausted`).

    With `rate` they all leave the dead letters now and become due one after the other, so many a second.
    """
    body = await read_model(request, RedriveBody, BODY_LIMIT)
    wanted, most = body.filter.meant(), api.settings.redrive_max
    counts = {
        "matched": await api.read(lambda conn: dead_letters.count(conn, wanted)),
        "exhausted": await api.read(lambda conn: dead_letters.exhausted(conn, wanted, most)),
    }
    ids = await api.read(lambda conn: dead_letters.matching(conn, wanted, body.max, most))
    if body.dry_run:
        return only_looked(counts, "redriven", ids)

    def start_over(batch: Sequence[str], first: int, conn: Any) -> Removed:
        return dead_letters.redrive(conn, batch, most, lambda n: delay_s(first + n, body.rate))

    redriven = await in_batches(api, ids, start_over)
    return Json(counts | {"redriven": redriven, "dry_run": False})


@router.post("/purge", openapi_extra=documented(PurgeBody.model_json_schema()))
async def purge(request: Request, api: Api) -> Json:
    """Forget them, oldest first: the jobs' rows go, their history in the audit trail stays.

    A job whose worker vanished stays while its GPU lease does; ask again in a minute. A workflow keeps its tasks.
    """
    body = await read_model(request, PurgeBody, BODY_LIMIT)
    wanted = body.filter.meant()
    counts = {"matched": await api.read(lambda conn: dead_letters.count(conn, wanted))}
    ids = await api.read(lambda conn: dead_letters.matching(conn, wanted, body.max))
    if body.dry_run:
        return only_looked(counts, "purged", ids)

    def forget(batch: Sequence[str], _first: int, conn: Any) -> Removed:
        return dead_letters.purge(conn, batch)

    purged = await in_batches(api, ids, forget)
    return Json(counts | {"purged": purged, "dry_run": False})


def only_looked(counts: dict[str, int], verb: str, ids: Sequence[str]) -> Json:
    return Json(counts | {verb: 0, "dry_run": True, "would_be": len(ids), "sample": ids[:SAMPLE]})


def delay_s(place: int, rate: float | None) -> float:
    """Whole seconds: those of one second share a statement."""
    return 0.0 if rate is None else float(int(place / rate))


async def in_batches(api: Backend, ids: Sequence[str], work: Work) -> int:
    """Several short transactions: workers must not wait for the locks of thousands of rows."""
    done = 0
    for first in range(0, len(ids), BATCH):
        removed = await api.write(partial(work, ids[first : first + BATCH], first))
        api.left_the_dead(removed)
        done += len(removed.job_ids)
    return done
