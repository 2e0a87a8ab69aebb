"""POST /jobs/{id}/cancel, /retry and /priority: what a client or an operator asks of one job."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.ids import JobId
from orchestrator.api.replies import Json
from orchestrator.jobs import Priority, Status
from orchestrator.store import dead_letters, job_reads, reorder, withdraw
from orchestrator.telemetry import metrics

router = APIRouter(prefix="/jobs", tags=["jobs"])

#: Bytes of a body that names a priority.
BODY_LIMIT = 4096


class Wish(BaseModel):
    """`LOW`, `NORMAL`, `HIGH` or -100…100; larger runs earlier."""

    model_config = ConfigDict(extra="forbid", strict=True)

    priority: Priority


@router.post("/{job_id}/cancel", responses={202: {"description": "Its worker has been asked to stop it."}})
async def cancel(api: Api, job_id: JobId) -> Json:
    """200: it is cancelled. 202: it runs, and ends as cancelled once its process is gone. 409: it ended otherwise.

    After either answer no result of it will be accepted. Again is fine.
    """
    status = await api.write(lambda conn: withdraw.cancel(conn, job_id))
    answer = {"job_id": job_id, "status": status, "cancel_requested": True}
    if status is Status.CANCELLED:
        return Json(answer)
    api.teller.ring()
    return Json(answer, 202)


@router.post("/{job_id}/retry")
async def retry(api: Api, job_id: JobId) -> Json:
    """Start a failed, cancelled or dead-lettered job over, with its attempts uncharged and without its deadline.

    409: it has not ended badly, or was started over as often as allowed (`redrive_max`).
    """
    nth = await api.read(lambda conn: job_reads.redrives(conn, job_id)) + 1
    most = api.settings.redrive_max
    removed = await api.write(lambda conn: dead_letters.redrive_one(conn, job_id, most, None, nth))
    metrics.retried("redrive")
    api.left_the_dead(removed)
    return Json({"job_id": job_id, "status": Status.PENDING, "redrives": nth})


@router.post("/{job_id}/priority", openapi_extra=documented(Wish.model_json_schema()))
async def priority(request: Request, api: Api, job_id: JobId) -> Json:
    """Let a waiting job run earlier or later, as if it had been submitted with this priority.

    409: it no longer waits.
    """
    wish = await read_model(request, Wish, BODY_LIMIT)
    placed = await api.write(lambda conn: reorder.set_priority(conn, job_id, wish.priority))
    api.orchestrator.publisher.nudge(placed.lane)
    return Json({"job_id": job_id, "status": Status.PENDING, "priority": placed.after, "before": placed.before})
