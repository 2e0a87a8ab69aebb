"""What HTTP workers do with jobs: look, claim, give signs of life, complete, fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from orchestrator.api.backend import Api, Backend
from orchestrator.api.body import LARGE, documented, read_model
from orchestrator.api.ids import JobId
from orchestrator.api.replies import Json, utc_text
from orchestrator.api.submit import ENVELOPE, trace_context
from orchestrator.api.waiters import unless_gone
from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.jobs import DEFAULT_LANE, ErrorKind
from orchestrator.jsontext import ESCAPED, canonical_json
from orchestrator.leases import Granted
from orchestrator.names import MAX_NAME, Name, is_name
from orchestrator.settings import Settings
from orchestrator.store import dispatch
from orchestrator.store.claim import Claim
from orchestrator.store.dispatch import Fetch
from orchestrator.store.nodes import NO_NODE
from orchestrator.store.reports import Ended, Heard, Sign
from orchestrator.store.settle import End, Outcome

router = APIRouter(prefix="/jobs", tags=["workers"])

#: Seconds of a year: nothing here lasts longer.
YEAR_S = 31_536_000

Span = Annotated[float, Field(ge=0, le=YEAR_S, allow_inf_nan=False)]


class DispatchableQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pool_id: Name = DEFAULT_LANE
    types: str | None = Field(None, max_length=20_000, description="names, separated by commas; all when absent")
    limit: int = Field(50, ge=1, le=dispatch.DEPTH)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    worker_id: Name


class ClaimBody(_Body):
    max: Annotated[int, Field(ge=1, le=100)] = 1
    wait_seconds: Span = 0.0


class AttemptBody(_Body):
    """Whose attempt speaks: the three of them prove it, and the row is asked every time."""

    attempt: Annotated[int, Field(ge=1, lt=2**31)]


class SignBody(AttemptBody):
    progress: Annotated[float, Field(ge=0, le=1)] | None = None
    note: Annotated[str, Field(max_length=255)] | None = None


class CompleteBody(AttemptBody):
    result: Any
    run_seconds: Span = 0.0


class FailBody(AttemptBody):
    error: Annotated[str, Field(max_length=16_384)]
    kind: Literal["transient", "permanent"] | None = None
    retry_after_seconds: Span | None = None
    skipped: bool = False
    run_seconds: Span = 0.0


@router.get("/dispatchable")
async def dispatchable(api: Api, query: Annotated[DispatchableQuery, Query()]) -> Json:
    """What could be claimed now, first what comes first; of a long backlog only its head is looked at."""
    types = _types(query.types)
    found = await api.read(lambda conn: dispatch.dispatchable(conn, query.pool_id, types, query.limit))
    return Json({"jobs": [_waiting(job) for job in found]})


@router.post("/claim", openapi_extra=documented(ClaimBody.model_json_schema()))
async def claim(request: Request, api: Api) -> Response:
    """Up to `max` jobs, no more than the worker has free slots, each with its lease; none after `wait_seconds`.

    `closed` says why a worker gets none, whatever waits: its node is drained, or its pool, or that is paused.
    """
    given = await read_model(request, ClaimBody, ENVELOPE)
    fetch = Fetch(given.worker_id, given.max)
    claims = await _claim(request, api, fetch, min(given.wait_seconds, api.settings.wait_max_s))
    if claims and await request.is_disconnected():
        api.orchestrator.remote.hand_back(given.worker_id, claims)
    policies = api.orchestrator.policies
    why = lambda conn: dispatch.why_none(conn, given.worker_id, policies.book(conn))  # noqa: E731 - read as a question
    closed = None if claims else await api.read(why)
    if closed:
        return Json({"jobs": [], "closed": closed})
    return Response(f'{{"jobs":[{",".join(map(_claimed, claims))}]}}', media_type=Json.media_type)


@router.post("/{job_id}/heartbeat", openapi_extra=documented(SignBody.model_json_schema()))
async def heartbeat(request: Request, api: Api, job_id: JobId) -> Json:
    """It runs; the first sign must come within the worker's `timeout_s`. When `cancel_requested`, stop and fail it."""
    given = await read_model(request, SignBody, ENVELOPE)
    heard = await api.report(given.worker_id, Sign(job_id, given.attempt, given.progress, given.note))
    assert isinstance(heard, Heard)
    return Json({"job_id": job_id, "cancel_requested": heard.cancel_requested})


@router.post("/{job_id}/complete", openapi_extra=documented(CompleteBody.model_json_schema()))
async def complete(request: Request, api: Api, job_id: JobId) -> Json:
    """Done, with its result. Again is fine: the first one counts. 409: it was not this attempt's to end."""
    given = await read_model(request, CompleteBody, ENVELOPE + ESCAPED * api.settings.payload_max_bytes)
    result = await _result(request, given.result, api.settings)
    end = End(job_id, given.attempt, Outcome.DONE, given.run_seconds, result)
    return await _end(api, given, end._replace(trace_context=trace_context(request)))


@router.post("/{job_id}/fail", openapi_extra=documented(FailBody.model_json_schema()))
async def fail(request: Request, api: Api, job_id: JobId) -> Json:
    """It ended badly, or was skipped; the answer says whether it waits for another attempt. 409 as for complete."""
    given = await read_model(request, FailBody, ENVELOPE)
    if given.skipped and (given.kind or given.retry_after_seconds is not None):
        raise InvalidInput("skipped: has neither kind nor retry_after_seconds, since nothing failed", "skipped")
    outcome = Outcome.SKIPPED if given.skipped else Outcome.FAILED
    kind = None if given.skipped else ErrorKind(given.kind or "transient")
    end = End(job_id, given.attempt, outcome, given.run_seconds, error_kind=kind, error=given.error)
    end = end._replace(retry_after_s=given.retry_after_seconds, trace_context=trace_context(request))
    return await _end(api, given, end)


async def _claim(request: Request, api: Backend, fetch: Fetch, wait_s: float) -> Sequence[Claim]:
    """Try, and again whenever something may have come; not for a client that has gone."""
    clock = asyncio.get_running_loop()
    until = clock.time() + wait_s
    while True:
        claims = await api.claim(fetch)
        left = until - clock.time()
        if claims or left <= 0 or not await unless_gone(request, api.openings.wait(frozenset({fetch.worker_id}), left)):
            return claims


async def _result(request: Request, value: object, settings: Settings) -> str:
    """As it is stored; large ones are written in a thread, so that other requests need not wait."""
    announced = request.headers.get("content-length", "")
    small = announced.isdecimal() and int(announced[:20]) < LARGE
    return _checked(value, settings) if small else await asyncio.to_thread(_checked, value, settings)


def _checked(value: object, settings: Settings) -> str:
    text = canonical_json(value, "result", settings.payload_max_depth)
    if len(text.encode()) > settings.payload_max_bytes:
        most = settings.payload_max_bytes
        raise PayloadTooLarge(f"result is larger than {most} bytes; store it elsewhere, return a reference", "result")
    return text


async def _end(api: Backend, given: AttemptBody, end: End) -> Json:
    ended = await api.report(given.worker_id, end)
    assert isinstance(ended, Ended)
    return Json({"job_id": end.job_id, "status": ended.status})


def _types(listed: str | None) -> frozenset[str] | None:
    if listed is None:
        return None
    names = listed.split(",")
    if wrong := [name for name in names if not is_name(name)]:
        raise InvalidInput(f"types: {wrong[0][:MAX_NAME]!r} is no name of a type", "types")
    return frozenset(names)


def _waiting(job: dispatch.Waiting) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "type": job.type,
        "priority": job.priority,
        "min_memory_mb": job.min_memory_mb,
        "waiting_seconds": max(round(float(job.waiting_s), 3), 0.0),
    }


def _claimed(job: Claim) -> str:
    """JSON. The payload is JSON text already, perhaps a megabyte of it: it goes in as it is."""
    head = {
        "job_id": job.job_id,
        "attempt": job.attempt,
        "type": job.type,
        "agent": job.agent,
        "model_id": job.model_id,
        "max_runtime_sec": job.max_runtime_sec,
        "trace_context": job.trace_context,
        "lease": _lease(job.lease) if job.lease else None,
    }
    return f'{json.dumps(head)[:-1]},"payload":{job.payload}}}'


def _lease(lease: Granted) -> dict[str, Any]:
    return {
        "mode": lease.mode,
        "gpu_uuid": lease.gpus[0].gpu_uuid if lease.gpus else None,
        "gpu_uuids": [gpu.gpu_uuid for gpu in lease.gpus],
        "gpu_index": lease.gpus[0].gpu_index if lease.gpus else None,
        "node_id": None if lease.node_id == NO_NODE else lease.node_id,
        "expires_at": utc_text(lease.expires_at),
    }
