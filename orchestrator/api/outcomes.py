"""POST /jobs/wait: what became of many jobs, in one request for all of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api
from orchestrator.api.body import documented, read_model
from orchestrator.api.replies import Json
from orchestrator.api.waiters import unless_gone
from orchestrator.names import Name
from orchestrator.store import job_reads

router = APIRouter(prefix="/jobs", tags=["jobs"])

#: Jobs that one request may ask about, and bytes that suffice to name them.
MAX_IDS = 1000
BODY_LIMIT = 262_144
#: Records of one answer, and bytes of their results; a single one may be larger.
MAX_RECORDS, MAX_RESULTS = 200, 4 * 2**20


class WaitBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    job_ids: Annotated[list[Name], Field(min_length=1, max_length=MAX_IDS)]
    wait: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds to wait until one of them has ended")


@router.post("/wait", openapi_extra=documented(WaitBody.model_json_schema()))
async def wait(request: Request, api: Api) -> Json:
    """The records of those that have ended, without payloads; with `wait`, once there is one or the time is over.

    Leave those out of the next request: `more` says that others have ended, too. `unknown` are ids of no job.
    """
    body = await read_model(request, WaitBody, BODY_LIMIT)
    ids = list(dict.fromkeys(body.job_ids))
    if body.wait:
        await unless_gone(request, api.waiters.wait(frozenset(ids), min(body.wait, api.settings.wait_max_s)))
    return Json(await api.read(lambda conn: job_reads.ended(conn, ids, MAX_RECORDS, MAX_RESULTS)))
