"""POST /jobs/{id}/cancel and /retry: what a client or an operator asks of one job."""

from __future__ import annotations

from fastapi import APIRouter

from orchestrator.api.backend import Api
from orchestrator.api.ids import JobId
from orchestrator.api.replies import Json
from orchestrator.jobs import Status
from orchestrator.store import dead_letters, job_reads, withdraw
from orchestrator.telemetry import metrics

router = APIRouter(prefix="/jobs", tags=["jobs"])


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
