"""/workers: who runs jobs, and the registration of those that come over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.replies import Json
from orchestrator.errors import InvalidInput
from orchestrator.identity import process_id
from orchestrator.jobs import DEFAULT_LANE
from orchestrator.names import Name, NewName, TypeName
from orchestrator.store import registry, worker_reads
from orchestrator.store.nodes import NO_NODE, Worker
from orchestrator.store.registry import Told

router = APIRouter(prefix="/workers", tags=["workers"])

#: Bytes of a body about a worker.
BODY_LIMIT = 65_536

Count = Annotated[int, Field(ge=0, lt=2**31)]


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(1000, ge=1, le=1000)
    cursor: str | None = Field(None, max_length=512)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RegisterBody(_Body):
    slots: Annotated[int, Field(ge=1, le=1024)]
    types: Annotated[list[TypeName], Field(min_length=1, max_length=256)]
    worker_id: NewName | None = None
    node_id: NewName | None = None
    pool_id: NewName = DEFAULT_LANE
    hostname: NewName = "http"
    #: The process on that node that uses the memory of its leases, with all it starts.
    pid: Annotated[int, Field(ge=1, le=2**22)] | None = None
    version: Annotated[str, Field(min_length=1, max_length=64)] | None = None


class HeartbeatBody(_Body):
    worker_id: Name
    busy: Count | None = None
    done: Count | None = None
    failed: Count | None = None


class DeregisterBody(_Body):
    worker_id: Name


@router.get("")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """Workers that are alive or were within the last hour, the youngest first; `next_cursor` is null at the end."""
    found, following = await api.read(lambda conn: worker_reads.page(conn, query.limit, query.cursor))
    return Json({"workers": found, "next_cursor": following})


@router.post("/register", openapi_extra=documented(RegisterBody.model_json_schema()))
async def register(request: Request, api: Api) -> Json:
    """A new worker, and how often it must be heard. 409: its id is taken, or something of its predecessor is left."""
    given = await read_model(request, RegisterBody, BODY_LIMIT)
    if given.pid is not None and given.node_id is None:
        raise InvalidInput("pid: needs node_id, since every node has a process of that number", "pid")
    worker = _worker(given)
    await api.write(lambda conn: registry.register(conn, worker))
    answer = {"worker_id": worker.worker_id, "pool_id": worker.pool_id}
    limits = {"heartbeat_s": api.settings.worker_heartbeat_s, "timeout_s": api.settings.worker_timeout_s}
    return Json(answer | limits)


@router.post("/heartbeat", openapi_extra=documented(HeartbeatBody.model_json_schema()))
async def heartbeat(request: Request, api: Api) -> Json:
    """It lives, and so do its leases. 410 `worker_lost`: its jobs run elsewhere; stop them and register anew."""
    given = await read_model(request, HeartbeatBody, BODY_LIMIT)
    await api.worker_heartbeat(Told(given.worker_id, given.busy, given.done, given.failed))
    return Json({"worker_id": given.worker_id})


@router.post("/deregister", openapi_extra=documented(DeregisterBody.model_json_schema()))
async def deregister(request: Request, api: Api) -> Json:
    """It leaves; what it still owns is handed back at once, uncharged. Again is fine."""
    given = await read_model(request, DeregisterBody, BODY_LIMIT)
    policy = api.orchestrator.retry_policy
    worker, back = await api.write(lambda conn: registry.deregister(conn, given.worker_id, policy))
    if back:
        api.orchestrator.publisher.nudge(worker.pool_id)
    return Json({"worker_id": given.worker_id, "handed_back": len(back)})


def _worker(given: RegisterBody) -> Worker:
    return Worker(
        given.worker_id or process_id(given.hostname, given.pid or 0),
        given.node_id or NO_NODE,
        given.pool_id,
        given.hostname,
        given.pid or 0,
        given.slots,
        tuple(sorted(set(given.types))),
        given.version,
    )
