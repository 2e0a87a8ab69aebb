"""/control: what operators do to a running cluster. Rows say what is wanted; supervisors are rung to look at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.api.backend import Api, Backend
from orchestrator.api.body import documented, read_model
from orchestrator.api.replies import Json
from orchestrator.errors import NodeNotFound, NotLeader, PolicyNotFound
from orchestrator.names import Name
from orchestrator.policies import PausePolicy, Scope
from orchestrator.store import audit, crews, gates, leadership, policies, pools
from orchestrator.store.leadership import Leadership

router = APIRouter(prefix="/control", tags=["control"])

#: Bytes that suffice to name a pool or a node.
BODY_LIMIT = 16_384
#: Pauses that are listed: operators set them, so there are few.
MOST_PAUSES = 1000

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
    """202: no job of it starts any more. 200: it was stopped or evicted `already`. Again sets the time anew."""
    body = await read_model(request, DrainPoolBody, BODY_LIMIT)
    timeout_s = _patience(api, body.timeout_seconds)
    closing = await api.write(lambda conn: pools.drain(conn, body.pool_id, timeout_s))
    api.pools_changed(body.pool_id, ring=True)
    return _closing(body.pool_id, closing, 200 if closing.already else 202)


@router.post("/evict_pool", openapi_extra=documented(PoolBody.model_json_schema()))
async def evict_pool(request: Request, api: Api) -> Json:
    """End it now: its running jobs are handed back, uncharged. A pool that is closed `already` stays what it is."""
    body = await read_model(request, PoolBody, BODY_LIMIT)
    closing = await api.write(lambda conn: pools.evict(conn, body.pool_id))
    api.pools_changed(body.pool_id, ring=True)
    return _closing(body.pool_id, closing, 200)


def _closing(pool_id: str, closing: pools.Closing, code: int) -> Json:
    return Json({"pool_id": pool_id, "status": closing.state, "already": closing.already}, code)


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


class ScopeBody(BaseModel):
    """What is paused or resumed: all jobs, or those of one pool, agent or type, which must be named."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    scope: Literal["all", "pool", "agent", "type"]
    name: Name | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.name is None) != (self.scope == "all"):
            raise ValueError(f"name: {'all jobs have no name' if self.scope == 'all' else 'say which'}")
        return self

    @property
    def key(self) -> str:
        return "global" if self.scope == "all" else f"{self.scope}:{self.name}"


class PauseBody(ScopeBody):
    reason: Annotated[str, Field(max_length=255)] = ""
    action: Literal["reject", "queue"] = "reject"


@router.post("/pause", openapi_extra=documented(PauseBody.model_json_schema()))
async def pause(request: Request, api: Api) -> Json:
    """Start nothing of it until it is resumed; what runs goes on. Submits are refused (503) or, by `queue`, kept."""
    body = await read_model(request, PauseBody, BODY_LIMIT)
    policy = PausePolicy(reason=body.reason, action=body.action)
    version = await api.write(lambda conn: policies.put(conn, Scope.PAUSE, body.key, policy))
    api.policies_changed()
    return Json({"key": body.key, "paused": True, "version": version} | policy.model_dump())


@router.post("/resume", openapi_extra=documented(ScopeBody.model_json_schema()))
async def resume(request: Request, api: Api) -> Json:
    """Again is fine. What another pause covers stays paused: `still_paused` has all there are."""
    body = await read_model(request, ScopeBody, BODY_LIMIT)

    def end(conn: Any) -> tuple[bool, list[str]]:
        try:
            policies.remove(conn, Scope.PAUSE, body.key)
            was_paused = True
        except PolicyNotFound:
            was_paused = False
        return was_paused, [row["name"] for row in policies.page(conn, Scope.PAUSE, "", MOST_PAUSES)]

    was_paused, left = await api.write(end)
    api.policies_changed()
    return Json({"key": body.key, "paused": False, "was_paused": was_paused, "still_paused": left})


@router.get("/paused")
async def paused(api: Api) -> Json:
    """What is paused, by key: `global`, `pool:NAME`, `agent:NAME`, `type:NAME`."""
    rows = await api.read(lambda conn: policies.page(conn, Scope.PAUSE, "", MOST_PAUSES))
    return Json({"paused": [_pause(row) for row in rows]})


def _pause(row: dict[str, Any]) -> dict[str, Any]:
    known = {"reason": "", "action": "reject"} | row["document"]
    return {"key": row["name"], **known, "version": row["version"], "since": row["updated_at"], "actor": row["actor"]}


@router.get("/gates")
async def admission_gates(api: Api) -> Json:
    """What the leader saw at each gate that the policies have, and whether it is closed."""
    return Json({"gates": await api.read(gates.listing)})


@router.post("/reconcile", status_code=202)
async def reconcile(api: Api) -> Json:
    """Compare pools with their workers now instead of within `reconcile_interval_s`. 409: another instance leads."""
    leading = api.orchestrator.leader.hurry("reconcile")
    if not leading:
        term = await _term(api)
        raise NotLeader(term.holder if term.alive else None)
    await api.write(lambda conn: audit.record(conn, [audit.Event("control.reconcile")]))
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
