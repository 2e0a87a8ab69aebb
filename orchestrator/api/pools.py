"""/workers/pool: what operators want of pools. The rows say it; the leader is asked to look at them now."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.ids import PoolId
from orchestrator.api.replies import Json, page_of
from orchestrator.names import Name
from orchestrator.pools import MAX_METADATA, PoolChange, PoolSpec
from orchestrator.store import backlog, pools

router = APIRouter(prefix="/workers/pool", tags=["pools"])

#: Bytes of a pool's description: characters of its metadata may take several each.
BODY_LIMIT = 8 * MAX_METADATA


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(500, ge=1, le=1000)
    cursor: Name | None = Field(None, description="the last pool_id already seen")


@router.post("", openapi_extra=documented(PoolSpec.model_json_schema()), status_code=201)
async def create(request: Request, api: Api) -> Json:
    """201: made, or begun anew after it was stopped or evicted. 200: it is there already, with the same content."""
    spec = (await read_model(request, PoolSpec, BODY_LIMIT)).named()

    def work(conn: Any) -> dict[str, Any]:
        pool_id, created = pools.create(conn, spec)
        return pools.get(conn, pool_id) | {"created": created}

    pool = await api.write(work)
    if pool["created"]:
        api.pools_changed(pool["pool_id"])
    return Json(pool, 201 if pool["created"] else 200)


@router.get("")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """Pools by id with what their live workers do; `next_cursor` is null at the end."""
    found = await api.read(lambda conn: pools.list_pools(conn, query.limit, query.cursor))
    return page_of("pools", found, "pool_id", query.limit)


@router.get("/{pool_id}")
async def get(api: Api, pool_id: PoolId) -> Json:
    """One pool with its workers (`members`), where they should be (`assignments`) and its oldest running job's age."""
    return Json(await api.read(lambda conn: pools.get(conn, pool_id)))


@router.patch("/{pool_id}", openapi_extra=documented(PoolChange.model_json_schema()))
async def change(request: Request, api: Api, pool_id: PoolId) -> Json:
    """Scale it; or swap its model: workers that have the new one loaded take over from the old, and none before."""
    wish = await read_model(request, PoolChange, BODY_LIMIT)

    def work(conn: Any) -> dict[str, Any]:
        pools.change(conn, pool_id, wish)
        return pools.get(conn, pool_id)

    pool = await api.write(work)
    api.pools_changed(pool_id)
    return Json(pool)


@router.delete("/{pool_id}")
async def delete(api: Api, pool_id: PoolId) -> Json:
    """Forget a pool that is stopped or evicted; how many jobs go on waiting in its lane is told."""

    def work(conn: Any) -> int:
        pools.forget(conn, pool_id)
        return backlog.left(conn, pool_id).waiting

    waiting = await api.write(work)
    api.pools_changed(pool_id)
    return Json({"pool_id": pool_id, "deleted": True, "waiting": waiting})
