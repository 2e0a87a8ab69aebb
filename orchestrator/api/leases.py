"""/leases: GPU memory for agents that run their own processes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.replies import Json
from orchestrator.errors import InvalidInput
from orchestrator.leases import Denied, Granted, LeaseRequest
from orchestrator.names import NewName
from orchestrator.settings import Settings
from orchestrator.store import lease_reads, leases

router = APIRouter(prefix="/leases", tags=["leases"])

#: Bytes of a request for a lease.
BODY_LIMIT = 16_384


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(1000, ge=1, le=1000)
    cursor: str | None = Field(None, max_length=512)


class LeaseBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    agent: NewName
    min_memory_mb: Annotated[int, Field(ge=1, le=2**31 - 1)]
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None
    gpu_count: Annotated[int, Field(ge=1, le=64)] = 1
    cpu_fallback: bool = False
    node_id: NewName | None = None
    #: The process on that node that will use the memory, with all it starts.
    pid: Annotated[int, Field(ge=1, le=2**22)] | None = None
    model_id: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    gpu_models: Annotated[list[Annotated[str, Field(min_length=1, max_length=255)]], Field(max_length=32)] = []
    host_cpus: Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)] = 0.0
    host_memory_mb: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0


@router.post("", openapi_extra=documented(LeaseBody.model_json_schema()))
async def request_lease(request: Request, api: Api) -> Json:
    """Granted with the secret token that proves it, or denied with the reason and when to ask again."""
    wanted = await read_model(request, LeaseBody, BODY_LIMIT)
    answer = await api.lease(_request(wanted, api.settings))
    return Json(_denied(answer) if isinstance(answer, Denied) else _granted(answer))


@router.get("")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """The leases that are held, oldest first; `lease` is the name the audit trail uses and opens nothing.

    `next_cursor` is null at the end.
    """
    found, following = await api.read(lambda conn: lease_reads.page(conn, query.limit, query.cursor))
    return Json({"leases": found, "next_cursor": following})


@router.post("/{token}/heartbeat")
async def heartbeat(api: Api, token: str) -> Json:
    return Json({"expires_at": await api.lease_heartbeat(token)})


@router.post("/{token}/release")
async def release(api: Api, token: str) -> Json:
    """Again is fine: a lease that is over already is what the caller wanted."""
    await api.write(lambda conn: leases.release(conn, token))
    return Json({"released": True})


def _request(wanted: LeaseBody, settings: Settings) -> LeaseRequest:
    ttl_s = settings.lease_ttl_s if wanted.ttl_seconds is None else wanted.ttl_seconds
    if ttl_s > settings.lease_ttl_max_s:
        raise InvalidInput(f"ttl_seconds: must not exceed {settings.lease_ttl_max_s:g}", "ttl_seconds")
    if wanted.pid is not None and wanted.node_id is None:
        raise InvalidInput("pid: needs node_id, since every node has a process of that number", "pid")
    return LeaseRequest(
        agent=wanted.agent,
        memory_mb=wanted.min_memory_mb,
        ttl_s=ttl_s,
        gpu_count=wanted.gpu_count,
        cpu_fallback=wanted.cpu_fallback,
        node_id=wanted.node_id,
        pid=wanted.pid,
        model_id=wanted.model_id,
        gpu_models=frozenset(wanted.gpu_models),
        host_cpu_milli=round(wanted.host_cpus * 1000),
        host_memory_mb=wanted.host_memory_mb,
    )


def _granted(lease: Granted) -> dict[str, Any]:
    gpus = [{"gpu_uuid": gpu.gpu_uuid, "gpu_index": gpu.gpu_index} for gpu in lease.gpus]
    first: dict[str, Any] = gpus[0] if gpus else {"gpu_uuid": None, "gpu_index": None}
    answer = {
        "granted": True,
        "token": lease.request.token,
        "mode": lease.mode,
        "node_id": lease.node_id,
        "expires_at": lease.expires_at,
    }
    return answer | first | ({"gpus": gpus} if lease.request.gpu_count > 1 else {})


def _denied(answer: Denied) -> dict[str, Any]:
    return {
        "granted": False,
        "reason": answer.reason,
        "code": answer.code,
        "lasts": answer.lasts,
        "retry_after": answer.retry_after_s,
        "gpus": [
            {"node_id": gpu.node_id, "gpu_index": gpu.gpu_index, "free_mb": max(gpu.free_mb, 0)} for gpu in answer.gpus
        ],
    }
