"""POST /jobs/{id}/cancel, /retry and /priority: what is asked of one job; /jobs/retry_failed: of all that failed."""

from __future__ import annotations

import logging
from functools import partial, reduce
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.bulk import BulkRedrive, Chosen, choose, start_over
from orchestrator.api.dlq import Reason
from orchestrator.api.ids import JobId
from orchestrator.api.replies import Json
from orchestrator.jobs import Priority, Status
from orchestrator.names import Name
from orchestrator.store import dead_letters, failures, job_reads, reorder, withdraw

log = logging.getLogger(__name__)

router = APIRouter(prefix="/jobs", tags=["jobs"])

#: Bytes of a body that names a priority.
BODY_LIMIT = 4096


class Wish(BaseModel):
    """`LOW`, `NORMAL`, `HIGH` or -100…100; larger runs earlier."""

    model_config = ConfigDict(extra="forbid", strict=True)

    priority: Priority


class FailedFilter(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    status: Literal["failed", "dead_letter"] | None = Field(None, description="absent: both")
    type: Name | None = None
    agent: Name | None = None
    pool_id: Name | None = None
    error_kind: Reason | None = Field(None, description="what ended the last attempt, such as timeout")

    def meant(self) -> failures.Filter:
        statuses = failures.FAILED if self.status is None else (Status(self.status),)
        return failures.Filter(statuses, self.type, self.agent, self.pool_id, self.error_kind)


class RetryFailedBody(BulkRedrive):
    filter: FailedFilter = Field(description="which jobs; {} means all that failed and must be said")


@router.post("/retry_failed", openapi_extra=documented(RetryFailedBody.model_json_schema()))
async def retry_failed(request: Request, api: Api) -> Json:
    """Start over what failed or is a dead letter, oldest first; those at `redrive_max` stay (`exhausted`).

    `matched` and `exhausted` are counted up to 10000. A job that fails again meanwhile is not started over again.
    """
    body = await read_model(request, RetryFailedBody, BODY_LIMIT)
    wanted, most = body.filter.meant(), api.settings.redrive_max
    looks = [partial(failures.look, wanted=wanted, status=status) for status in wanted.statuses]
    chosen = reduce(Chosen.join, [await choose(api, look, body.max, most) for look in looks])
    return await start_over(api, chosen, body, failures.redrive)


@router.post("/{job_id}/cancel", responses={202: {"description": "Its worker has been asked to stop it."}})
async def cancel(api: Api, job_id: JobId) -> Json:
    """200: it is cancelled. 202: it runs, and ends as cancelled once its process is gone. 409: it ended otherwise.

    After either answer no result of it will be accepted. Again is fine.
    """
    status = await api.write(lambda conn: withdraw.cancel(conn, job_id))
    log.info("cancel asked", extra={"job_id": job_id, "status": status})
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
    removed = await api.write(lambda conn: dead_letters.redrive_one(conn, job_id, most, nth))
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
