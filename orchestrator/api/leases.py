"""/leases: GPU memory for agents that run their own processes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.replies import Json
from orchestrator.errors import InvalidInput
from orchestrator.leases import Denied, Granted, LeaseRequest
from orchestrator.names import Name
from orchestrator.settings import Settings
from orchestrator.store import leases

router = APIRouter(prefix="/leases", tags=["leases"])

#: Bytes of a request for a lease.
BODY_LIMIT = 16_384


class LeaseBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    agent: Name
    min_memory_mb: Annotated[int, Field(ge=1, le=2**31 - 1)]
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None
    gpu_count: Annotated[int, Field(ge=1, le=64)] = 1
    cpu_fallback: bool = False
    node_id: Name | None = None
    #: The process that will use the memory, on that node: the sampler then knows whose memory it sees.
    pid: Annotated[int, Field(ge=1, le=2**22)] | None = None


@router.post("", openapi_extra=documented(LeaseBody.model_json_schema()))
async def request_lease(request: Request, api: Api) -> Json:
    """Granted with the secret token that proves it, or denied with the reason and when to ask again."""
    wanted = await read_model(request, LeaseBody, BODY_LIMIT)
    answer = await api.lease(_request(wanted, api.settings))
    return Json(_denied(answer) if isinstance(answer, Denied) else _granted(answer))


@router.get("")
async def active(api: Api) -> Json:
    """The leases that are held, oldest first; `lease` is the name the audit trail uses and opens nothing."""
    return Json({"leases": await api.read(leases.active)})


@router.post("/{token}/heartbeat")
async def heartbeat(api: Api, token: str) -> Json:
    return Json({"expires_at": await api.write(lambda conn: leases.heartbeat(conn, token))})


@router.post("/{token}/release")
async def release(api: Api, token: str) -> Json:
    """Again is fine: a lease that is over already is what the caller wanted."""
    await api.write(lambda conn: leases.release(conn, token))
    return Json({"released": True})


def _request(wanted: LeaseBody, settings: Settings) -> LeaseRequest:
    ttl_s = settings.lease_ttl_s if wanted.ttl_seconds is None else wanted.ttl_seconds
    if ttl_s > settings.lease_ttl_max_s:
        raise InvalidInput(f"ttl_seconds: must not exceed {settings.lease_ttl_max_s:g}", "ttl_seconds")
    return LeaseRequest(
        agent=wanted.agent,
        memory_mb=wanted.min_memory_mb,
        ttl_s=ttl_s,
        gpu_count=wanted.gpu_count,
        cpu_fallback=wanted.cpu_fallback,
        node_id=wanted.node_id,
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
    return {"granted": False, "reason": answer.reason, "retry_after": answer.retry_after_s}
