"""/workflows: tasks that wait for one another. The rows are the truth; whoever ends a task lets the next ones go."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api, Backend
from orchestrator.api.body import documented, read_json, read_model
from orchestrator.api.ids import JobId, WorkflowId
from orchestrator.api.replies import Json
from orchestrator.api.submit import BATCH_PAYLOADS, ENVELOPE, submitting
from orchestrator.errors import InvalidInput
from orchestrator.names import Name
from orchestrator.store import audit, flows, workflows
from orchestrator.store.inputs import page as inputs_of
from orchestrator.store.sweeping import Walk
from orchestrator.workflows import FlowStatus, Limits, NewWorkflow, WorkflowBody, prepare_tasks

router = APIRouter(tags=["workflows"])

#: Bytes of a body that names a task.
BODY_LIMIT = 4096

_TASKS = {
    "type": "object",
    "required": ["tasks"],
    "additionalProperties": False,
    "properties": {"tasks": WorkflowBody.model_json_schema()["properties"]["tasks"]},
}


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    status: FlowStatus | None = None
    agent: Name | None = None
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, max_length=512)


class TasksQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=500, description="tasks to a page")
    cursor: str | None = Field(None, max_length=512)


class EventsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: int = Field(0, ge=0, lt=2**63, description="id of the last event already seen")
    limit: int = Field(1000, ge=1, le=1000)


class InputsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: int = Field(-1, ge=-1, lt=2**31, description="position of the last result already seen")
    name: Name | None = None


class Again(BaseModel):
    """The task that is to run again, by its name or its job_id."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str = Field(min_length=1, max_length=128)


@router.post("/workflows", status_code=202, openapi_extra=documented(WorkflowBody.model_json_schema()))
async def create(request: Request, api: Api) -> Json:
    """202: it is new, and stored with all its tasks. 200: this very one was stored before. 409: its id is taken."""
    body = await read_json(request, ENVELOPE + BATCH_PAYLOADS * api.settings.payload_max_bytes)
    with submitting(request) as traced:
        new = NewWorkflow.prepare(body, Limits.of(api.settings, traced.context))
        traced.about({"workflow.id": new.workflow_id, "orchestrator.batch.size": len(new.tasks)})
        created = await api.enter(lambda conn, db, rules: workflows.create(conn, db, new, rules))
    api.orchestrator.entered([task.job for task in new.tasks] if created else ())
    found = await api.read(lambda conn: workflows.get(conn, new.workflow_id, 500))
    return Json(found | {"created": created}, 202 if created else 200)


@router.get("/workflows")
async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
    """Newest first, without tasks. `next_cursor` is null at the end, and only there.

    With both filters a page may have fewer rows than `limit`, or none, before that: it looks at two thousand workflows.
    """
    wanted = workflows.Filter(query.status, query.agent)
    found, following = await api.read(lambda conn: workflows.page(conn, wanted, query.limit, query.cursor))
    return Json({"workflows": found, "next_cursor": following})


@router.get("/workflows/{workflow_id}")
async def get(api: Api, workflow_id: WorkflowId, query: Annotated[TasksQuery, Query()]) -> Json:
    """With its progress and a page of its tasks, oldest first."""
    return Json(await api.read(lambda conn: workflows.get(conn, workflow_id, query.limit, query.cursor)))


@router.get("/workflows/{workflow_id}/events")
async def events(api: Api, workflow_id: WorkflowId, query: Annotated[EventsQuery, Query()]) -> Json:
    """Everything that happened to it, oldest first; what happened to a task is among the events of its job."""
    named = f"{flows.AUDITED}{workflow_id}"
    found = await api.read(lambda conn: audit.of_job(conn, named, query.after, query.limit))
    if not found:
        await api.read(lambda conn: workflows.agent_of(conn, workflow_id))
    return Json({"events": found})


@router.post("/workflows/{workflow_id}/tasks", status_code=202, openapi_extra=documented(_TASKS))
async def add(request: Request, api: Api, workflow_id: WorkflowId) -> Json:
    """Add tasks while it runs; they may need those that are there. Again is fine. 409: it runs no more."""
    body = await read_json(request, ENVELOPE + BATCH_PAYLOADS * api.settings.payload_max_bytes)
    if not isinstance(body, dict) or set(body) != {"tasks"}:
        raise InvalidInput('the body is {"tasks": [...]}', "tasks")
    agent = await api.read(lambda conn: workflows.agent_of(conn, workflow_id))
    with submitting(request) as traced:
        tasks = prepare_tasks(body["tasks"], workflow_id, agent, Limits.of(api.settings, traced.context))
        traced.about({"workflow.id": workflow_id, "orchestrator.batch.size": len(tasks)})
        added = await api.enter(lambda conn, db, rules: workflows.add(conn, db, workflow_id, tasks, rules))
    api.orchestrator.entered([task.job for task in tasks if task.name in added])
    return Json({"workflow_id": workflow_id, "added": added}, 202 if added else 200)


@router.post("/workflows/{workflow_id}/cancel")
async def cancel(api: Api, workflow_id: WorkflowId) -> Json:
    """Its waiting tasks end now, those that run are asked to stop. Again is fine. 409: it ended otherwise."""
    walk = await api.write(lambda conn: workflows.cancel(conn, workflow_id))
    _tell(api, walk)
    return Json({"workflow_id": workflow_id, "status": FlowStatus.CANCELLED})


@router.post("/workflows/{workflow_id}/retry_failed")
async def retry_failed(api: Api, workflow_id: WorkflowId) -> Json:
    """Start its failed, dead-lettered and cancelled tasks over; what ended well stays. 409: tasks still stop."""
    walk = await api.write(lambda conn: workflows.retry_failed(conn, workflow_id))
    _tell(api, walk)
    return Json(await api.read(lambda conn: workflows.get(conn, workflow_id)))


@router.post("/workflows/{workflow_id}/rerun", openapi_extra=documented(Again.model_json_schema()))
async def rerun(request: Request, api: Api, workflow_id: WorkflowId) -> Json:
    """Run a task again that has ended, with all that needs it and whatever ended badly. 409: one of them runs."""
    wish = await read_model(request, Again, BODY_LIMIT)
    again = await api.write(lambda conn: workflows.rerun(conn, workflow_id, wish.task))
    _tell(api, again.walk)
    return Json(await api.read(lambda conn: workflows.get(conn, workflow_id)) | {"restarted": again.tasks})


@router.get("/jobs/{job_id}/inputs")
async def inputs(api: Api, job_id: JobId, query: Annotated[InputsQuery, Query()]) -> Json:
    """The results of what a task needed, in order; `next_after` is null at the end."""
    found = await api.read(lambda conn: inputs_of(conn, job_id, query.after, query.name))
    shown = [one.document() for one in found.inputs]
    return Json({"inputs": shown, "next_after": found.inputs[-1].position if found.more else None})


def _tell(api: Backend, walk: Walk) -> None:
    """What was begun in the transaction goes on by the leader; workers and streams hear of it."""
    for lane in walk.lanes:
        api.orchestrator.publisher.nudge(lane)
    api.teller.take_back_letters(walk.entry_ids)
    if walk.asked:
        api.teller.ring()
    api.orchestrator.leader.hurry("workflows")
