"""/schedules: jobs that come again and again. The rows say when; the leader fires them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_json
from orchestrator.api.ids import ScheduleId
from orchestrator.api.replies import Json, page_of
from orchestrator.api.submit import ENVELOPE, submitting
from orchestrator.errors import InvalidInput
from orchestrator.jobs import Status
from orchestrator.jsontext import ESCAPED
from orchestrator.names import Name, is_dots
from orchestrator.schedules import MAX_ID, ScheduleSpec, fire_id, recurring_job
from orchestrator.store import schedules
from orchestrator.store.dialect import clock
from orchestrator.store.submit import Verdict, refusal

router = APIRouter(prefix="/schedules", tags=["schedules"])


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=500)
    cursor: Name | None = Field(None, description="the last schedule_id already seen")


@router.get("")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """By id, with the next time of each; `next_cursor` is null at the end."""
    found = await api.read(lambda conn: schedules.page(conn, query.cursor, query.limit))
    return page_of("schedules", found, "schedule_id", query.limit)


@router.get("/{schedule_id}")
async def get(api: Api, schedule_id: ScheduleId) -> Json:
    """`last_error` says why the last time it fired there was no job."""
    return Json(await api.read(lambda conn: schedules.get(conn, schedule_id)))


@router.put("/{schedule_id}", openapi_extra=documented(ScheduleSpec.model_json_schema()))
async def put(request: Request, api: Api, schedule_id: ScheduleId) -> Json:
    """201: made. 200: changed, or there already. Its job is checked as a submit; another rhythm begins now."""
    if len(schedule_id) > MAX_ID:
        raise InvalidInput(f"schedule_id: longer than {MAX_ID} characters", "schedule_id")
    if is_dots(schedule_id):
        raise InvalidInput(
            "schedule_id: cannot be made of dots alone, which a path would take for the way up", "schedule_id"
        )
    body = await read_json(request, ENVELOPE + ESCAPED * api.settings.payload_max_bytes)
    spec = ScheduleSpec.parse(body, api.settings.payload_max_bytes, api.settings.payload_max_depth)

    def work(conn: Any) -> tuple[bool, dict[str, Any]]:
        return schedules.put(conn, schedule_id, spec), schedules.get(conn, schedule_id)

    created, schedule = await api.write(work)
    return Json(schedule, 201 if created else 200)


@router.delete("/{schedule_id}")
async def delete(api: Api, schedule_id: ScheduleId) -> Json:
    """Forget it; jobs that it made stay."""
    await api.write(lambda conn: schedules.remove(conn, schedule_id))
    return Json({"schedule_id": schedule_id, "deleted": True})


@router.post("/{schedule_id}/fire", status_code=202)
async def fire(request: Request, api: Api, schedule_id: ScheduleId) -> Json:
    """Submit its job now, once, enabled or not; its next time stays what it is."""

    def look(conn: Any) -> tuple[dict[str, Any], Any]:
        return schedules.get(conn, schedule_id)["job"], clock(conn)

    template, now = await api.read(look)
    limits = api.settings.payload_max_bytes, api.settings.payload_max_depth
    with submitting(request) as traced:
        job = recurring_job(template, fire_id(schedule_id, now), *limits, traced.context)
        traced.about({"job.id": job.job_id, "job.type": job.spec.type, "orchestrator.schedule": schedule_id})
        answer = await api.enter(lambda conn, db, rules: schedules.fire_now(conn, db, schedule_id, job, rules))
        if refused := refusal(job, answer):
            raise refused
    api.orchestrator.entered([job] if answer is Verdict.CREATED else ())
    return Json({"schedule_id": schedule_id, "job_id": job.job_id, "status": Status.PENDING}, 202)
