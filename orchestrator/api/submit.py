"""POST /jobs/submit and /jobs/submit_batch: from bytes to a committed row."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

from fastapi import APIRouter, Request

from orchestrator.api.backend import Api, Backend
from orchestrator.api.body import documented, read_json
from orchestrator.api.problems import describe
from orchestrator.api.replies import Json
from orchestrator.errors import InvalidInput, JobNotFound, OrchestratorError, PayloadTooLarge
from orchestrator.jobs import JobSpec, NewJob, Status
from orchestrator.jsontext import ESCAPED
from orchestrator.store.job_reads import statuses
from orchestrator.store.submit import Answer, Verdict, refusal
from orchestrator.telemetry import tracing

router = APIRouter(prefix="/jobs", tags=["jobs"])

#: Bytes for all that is not payload.
ENVELOPE = 65_536
#: Largest payloads that fit into one batch together; most are far smaller.
BATCH_PAYLOADS = 32

_SPEC = JobSpec.model_json_schema()
_SPEC["properties"]["priority"] |= {
    "type": ["integer", "string"],
    "description": "LOW, NORMAL, HIGH or -100…100",
}
_BATCH = {
    "type": "object",
    "required": ["jobs"],
    "additionalProperties": False,
    "properties": {"jobs": {"type": "array", "items": _SPEC}},
}


@router.post("/submit", status_code=202, openapi_extra=documented(_SPEC))
async def submit(request: Request, api: Api) -> Json:
    """202: the job is new and stored. 200: this very job was stored before. 409: its id is taken."""
    body = await read_json(request, ENVELOPE + ESCAPED * api.settings.payload_max_bytes)
    with submitting(request) as traced:
        job = prepare(api, body, traced.context)
        about = {"job.id": job.job_id, "job.type": job.spec.type, "job.agent": job.spec.agent}
        traced.about(about | {"orchestrator.lane": job.spec.pool_id})
        [verdict] = await api.submit([job])
        if refused := refusal(job, verdict):
            raise refused
    if verdict is Verdict.CREATED:
        return Json({"job_id": job.job_id, "status": Status.PENDING, "created": True}, 202)
    status = (await _statuses(api, [job.job_id])).get(job.job_id)
    if status is None:  # removed between the two questions
        raise JobNotFound(job.job_id)
    return Json({"job_id": job.job_id, "status": status, "created": False})


@router.post("/submit_batch", openapi_extra=documented(_BATCH))
async def submit_batch(request: Request, api: Api) -> Json:
    """A verdict per item, in order. Refused items do not stop the others, which share one transaction."""
    body = await read_json(request, ENVELOPE + BATCH_PAYLOADS * api.settings.payload_max_bytes)
    items = _items(body, api.settings.batch_max_jobs)
    with submitting(request) as traced:
        traced.about({"orchestrator.batch.size": len(items)})
        prepared = await asyncio.to_thread(lambda: [_try_prepare(api, item, traced.context) for item in items])
        valid = [job for job in prepared if isinstance(job, NewJob)]
        verdicts = dict(zip(map(id, valid), await api.submit(valid) if valid else [], strict=True))
    existing = [job.job_id for job in valid if verdicts[id(job)] is Verdict.EXISTS]
    statuses = await _statuses(api, existing) if existing else {}
    answers = [_answer(job, verdicts.get(id(job)), statuses) for job in prepared]
    return Json({"jobs": answers} | _counts(answers))


def prepare(api: Backend, body: object, context: str | None) -> NewJob:
    return NewJob.prepare(body, api.settings.payload_max_bytes, api.settings.payload_max_depth, context)


def submitting(request: Request) -> AbstractContextManager[tracing.Submit]:
    """The span of this submit, in the caller's trace."""
    return tracing.submitting(trace_context(request), **{"http.route": request.scope["route"].path})


def trace_context(request: Request) -> str | None:
    """The caller's trace. A malformed one is ignored, as the standard wants it: it must not cost a job."""
    return tracing.accepted(request.headers.get("traceparent"))


async def _statuses(api: Backend, job_ids: list[str]) -> dict[str, Status]:
    return await api.read(lambda conn: statuses(conn, job_ids))


def _items(body: object, most: int) -> list[object]:
    if not isinstance(body, dict) or not isinstance(body.get("jobs"), list):
        raise InvalidInput('a batch is {"jobs": [...]}', "jobs")
    if unknown := sorted(set(body) - {"jobs"}):
        raise InvalidInput(f"unknown field {unknown[0][:80]!r}; a batch has only jobs", unknown[0][:80])
    items: list[object] = body["jobs"]
    if len(items) > most:
        raise PayloadTooLarge(f"{len(items)} jobs in one batch; at most {most} are allowed", "jobs")
    return items


def _try_prepare(api: Backend, item: object, context: str | None) -> NewJob | OrchestratorError:
    try:
        return prepare(api, item, context)
    except OrchestratorError as refused:
        return refused


def _answer(job: NewJob | OrchestratorError, verdict: Answer | None, statuses: dict[str, Status]) -> dict[str, Any]:
    if isinstance(job, OrchestratorError):
        return {"error": describe(job)}
    if verdict is not None and (refused := refusal(job, verdict)):
        return {"job_id": job.job_id, "error": describe(refused)}
    created = verdict is Verdict.CREATED
    return {"job_id": job.job_id, "status": statuses.get(job.job_id, Status.PENDING), "created": created}


def _counts(answers: list[dict[str, Any]]) -> dict[str, int]:
    created = [answer["created"] for answer in answers if "created" in answer]
    return {
        "created": sum(created),
        "existing": len(created) - sum(created),
        "refused": len(answers) - len(created),
    }
