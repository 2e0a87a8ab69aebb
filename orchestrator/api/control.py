"""/control: what operators do to a running cluster. Rows say what is wanted; supervisors are rung to look at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.api.backend import Api, Backend
from orchestrator.api.body import documented, read_model
from orchestrator.api.replies import Json
from orchestrator.errors import NodeNotFound, NotLeader
from orchestrator.names import Name
from orchestrator.pools import PoolState
from orchestrator.store import crews, leadership, pools
from orchestrator.store.leadership import Leadership

router = APIRouter(prefix="/control", tags=["control"])

#: Bytes that suffice to name a pool or a node.
BODY_LIMIT = 16_384

#: What running jobs get to end, at most a year; absent: `pool_drain_s`.
Patience = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)] | None


class PoolBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    pool_id: Name


class DrainPoolBody(PoolBody):
    timeout_seconds: Patience = None


class NodeBody(BaseModel):
    """One node by its name, or all of them, which must be said."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    node_id: Name | None = None
    all: bool = False

    @model_validator(mode="after")
    def _one_or_all(self) -> Self:
        if (self.node_id is None) != self.all:
            raise ValueError('say either node_id or "all": true')
        return self

    @property
    def meant(self) -> list[str] | None:
        return None if self.node_id is None else [self.node_id]


class DrainNodeBody(NodeBody):
    timeout_seconds: Patience = None


@router.post(
    "/drain_pool",
    openapi_extra=documented(DrainPoolBody.model_json_schema()),
    responses={202: {"description": "It takes no more jobs; it is stopped once those that run have ended."}},
)
async def drain_pool(request: Request, api: Api) -> Json:
    """202: no job of it starts any more. 200: it was stopped or evicted already. Again sets the time anew."""
    body = await read_model(request, DrainPoolBody, BODY_LIMIT)
    timeout_s = _patience(api, body.timeout_seconds)
    state = await api.write(lambda conn: pools.drain(conn, body.pool_id, timeout_s))
    api.pools_changed(body.pool_id, ring=True)
    return Json({"pool_id": body.pool_id, "status": state}, 202 if state is PoolState.DRAINING else 200)


@router.post("/evict_pool", openapi_extra=documented(PoolBody.model_json_schema()))
async def evict_pool(request: Request, api: Api) -> Json:
    """End it now: its running jobs are handed back, uncharged. A pool that is closed already stays what it is."""
    body = await read_model(request, PoolBody, BODY_LIMIT)
    state = await api.write(lambda conn: pools.evict(conn, body.pool_id))
    api.pools_changed(body.pool_id, ring=True)
    return Json({"pool_id": body.pool_id, "status": state})


@router.post("/drain_node", openapi_extra=documented(DrainNodeBody.model_json_schema()))
async def drain_node(request: Request, api: Api) -> Json:
    """Empty nodes: they take no more jobs, of any lane, until they are resumed; their pools move elsewhere."""
    body = await read_model(request, DrainNodeBody, BODY_LIMIT)
    timeout_s = _patience(api, body.timeout_seconds)
    told = await api.write(lambda conn: crews.drain_nodes(conn, body.meant, timeout_s))
    return _told(api, body, told)


@router.post("/resume_node", openapi_extra=documented(NodeBody.model_json_schema()))
async def resume_node(request: Request, api: Api) -> Json:
    body = await read_model(request, NodeBody, BODY_LIMIT)
    told = await api.write(lambda conn: crews.resume_nodes(conn, body.meant))
    return _told(api, body, told)


@router.post("/reconcile", status_code=202)
async def reconcile(api: Api) -> Json:
    """Compare pools with their workers now instead of within `reconcile_interval_s`. 409: another instance leads."""
    leading = api.orchestrator.leader.hurry("reconcile")
    if not leading:
        term = await _term(api)
        raise NotLeader(term.holder if term.alive else None)
    return Json({"hurried": True, "holder": api.orchestrator.holder}, 202)


@router.get("/leader")
async def leader(api: Api) -> Json:
    """Who leads, by the database's word; `self` is the instance that answers."""
    return Json(asdict(await _term(api)) | {"self": api.orchestrator.holder})


async def _term(api: Backend) -> Leadership:
    return await api.read(lambda conn: leadership.current(conn, api.settings.leader_lock))


def _patience(api: Backend, asked_s: float | None) -> float:
    return api.settings.pool_drain_s if asked_s is None else asked_s


def _told(api: Backend, body: NodeBody, count: int) -> Json:
    if body.node_id is not None and not count:
        raise NodeNotFound(body.node_id)
    api.pools_changed(body.node_id or "all", ring=True)
    return Json({"nodes": count})
