"""Workflows: tasks that wait for one another, as clients describe them. Pure; the rows are `store.workflows`.

A task is a job with a name and the names of those it needs. They form a graph without cycles. A task that is critical
(the default) fails its workflow when it fails; when one that is not fails, those that need it go on without it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.identity import fresh_id
from orchestrator.jobs import Moment, NewJob, Status, as_utc, readable
from orchestrator.jsontext import canonical_json
from orchestrator.names import MAX_NAME, NEW_PATTERN, NewName
from orchestrator.settings import Settings

#: Characters of a workflow's name: with the name of a task it is the id of a job.
MAX_ID = 100
#: Levels in a workflow's body above a payload.
ENVELOPE_DEPTH = 8
#: What a task cannot say, and why.
_NOT_OF_TASKS = {
    "job_id": "is made of the workflow's id and the task's name; leave it out",
    "workflow_id": "is that of the workflow; leave it out",
}

WorkflowId = Annotated[str, Field(pattern=NEW_PATTERN, max_length=MAX_ID)]


class FlowStatus(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Sweep(StrEnum):
    """What is being done to the tasks of a workflow, batch after batch."""

    #: Those that wait are cancelled.
    PENDING = "pending"
    #: All that have not ended are cancelled.
    ALL = "all"
    #: Those that ended badly start over.
    RETRY = "retry"
    #: They are deleted, and the workflow with the last of them (`store.retention`).
    FORGET = "forget"


#: Ends of a task after which those that need it may go on.
GOOD = frozenset({Status.DONE, Status.SKIPPED})
#: Ends of a task that fail a workflow if it is critical.
BAD = frozenset({Status.FAILED, Status.CANCELLED, Status.DEAD_LETTER})


class WorkflowBody(BaseModel):
    """A workflow as a client describes it. A task has the fields of a job, and `name`, `depends_on`, `critical`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tasks: list[dict[str, Any]]
    workflow_id: WorkflowId | None = None
    name: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    #: Whose it is, and of all tasks that do not say so themselves.
    agent: NewName = "anonymous"
    max_runtime_sec: Annotated[float, Field(gt=0, le=31_536_000)] | None = None
    deadline_at: Moment | None = None


class _Task(BaseModel):
    """What a task has beside the fields of a job."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: NewName
    depends_on: Annotated[list[NewName], Field(default_factory=list, max_length=1000)]
    critical: bool = True


@dataclass(frozen=True)
class Task:
    name: str
    job: NewJob
    depends_on: tuple[str, ...] = ()
    optional: bool = False

    @classmethod
    def prepare(cls, body: Mapping[str, Any], workflow_id: str, agent: str, limits: Limits) -> Task:
        """Raises InvalidInput that names the task."""
        try:
            own = _Task.model_validate(body)
        except ValidationError as invalid:
            raise readable(invalid, "a task") from None
        job = {key: value for key, value in body.items() if key not in _Task.model_fields}
        for field, why in _NOT_OF_TASKS.items():
            if field in job:
                raise InvalidInput(f"task {own.name!r}: {field} {why}", field)
        if own.depends_on and "earliest_start_at" in job:
            message = f"task {own.name!r}: earliest_start_at is not for one that starts when others have ended"
            raise InvalidInput(message, "earliest_start_at")
        if len(set(own.depends_on)) < len(own.depends_on):
            raise InvalidInput(f"task {own.name!r}: depends_on names a task twice", "depends_on")
        given = {"agent": agent} | job | {"workflow_id": workflow_id, "job_id": task_id(workflow_id, own.name)}
        try:
            new = NewJob.prepare(given, limits.max_bytes, limits.max_depth, limits.trace_context)
        except InvalidInput as wrong:
            raise type(wrong)(f"task {own.name!r}: {wrong.message}", wrong.field) from None
        return cls(own.name, new, tuple(own.depends_on), not own.critical)


@dataclass(frozen=True)
class Limits:
    max_bytes: int
    max_depth: int
    max_tasks: int = 1000
    trace_context: str | None = None

    @classmethod
    def of(cls, settings: Settings, trace_context: str | None = None) -> Self:
        return cls(settings.payload_max_bytes, settings.payload_max_depth, settings.batch_max_jobs, trace_context)


@dataclass(frozen=True)
class NewWorkflow:
    """A checked workflow on its way into the store; its tasks in an order in which they could run."""

    workflow_id: str
    name: str | None
    agent: str
    max_runtime_sec: float | None
    deadline: datetime | None
    tasks: tuple[Task, ...]
    content_hash: str

    @classmethod
    def prepare(cls, body: object, limits: Limits) -> Self:
        """Raises InvalidInput or PayloadTooLarge; nothing has been written then."""
        try:
            spec = WorkflowBody.model_validate(body)
        except ValidationError as invalid:
            raise readable(invalid, "a workflow") from None
        workflow_id = spec.workflow_id or new_workflow_id()
        tasks = prepare_tasks(spec.tasks, workflow_id, spec.agent, limits)
        check_known(tasks, ())
        deadline = as_utc(spec.deadline_at, "deadline_at")
        about = [spec.name, spec.agent, spec.max_runtime_sec, str(deadline)]
        # The order in which they are written is no content, that of what one needs is: so come its results.
        content = sorted([one.name, one.job.content_hash, [*one.depends_on], one.optional] for one in tasks)
        text = canonical_json([about, content], "workflow", ENVELOPE_DEPTH)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(
            workflow_id,
            spec.name,
            spec.agent,
            spec.max_runtime_sec,
            deadline,
            tuple(in_order(tasks)),
            digest,
        )

    def expires_at(self, now: datetime) -> datetime | None:
        """When its time is over, if it begins now."""
        limits = [self.deadline, now + timedelta(seconds=self.max_runtime_sec) if self.max_runtime_sec else None]
        return min((limit for limit in limits if limit is not None), default=None)


def prepare_tasks(bodies: object, workflow_id: str, agent: str, limits: Limits) -> list[Task]:
    """Raises InvalidInput or PayloadTooLarge."""
    if not isinstance(bodies, list) or not bodies or not all(isinstance(body, dict) for body in bodies):
        raise InvalidInput("tasks: name at least one, each an object", "tasks")
    if len(bodies) > limits.max_tasks:
        raise PayloadTooLarge(f"{len(bodies)} tasks at once; at most {limits.max_tasks} are allowed", "tasks")
    tasks = [Task.prepare(body, workflow_id, agent, limits) for body in bodies]
    if twice := next((name for name, count in Counter(task.name for task in tasks).items() if count > 1), None):
        raise InvalidInput(f"tasks: {twice!r} is there twice; name each task once", "tasks")
    return tasks


def check_known(tasks: Sequence[Task], known: Sequence[str]) -> None:
    """Raises InvalidInput for a task that needs one which is neither among these nor known."""
    names = {*known, *(task.name for task in tasks)}
    for task in tasks:
        for needed in task.depends_on:
            if needed not in names:
                message = f"task {task.name!r}: depends_on names {needed!r}, and there is no such task"
                raise InvalidInput(message, "depends_on")


def in_order(tasks: Sequence[Task]) -> list[Task]:
    """Each behind those it needs; otherwise as they came. Raises InvalidInput that names a cycle."""
    by_name = {task.name: task for task in tasks}
    if cycle := find_cycle(
        {name: [one for one in task.depends_on if one in by_name] for name, task in by_name.items()}
    ):
        raise InvalidInput(f"tasks: {' → '.join(cycle)} is a cycle; none of them could ever start", "depends_on")
    placed: dict[str, Task] = {}
    waiting = list(tasks)
    while waiting:
        ready = [task for task in waiting if all(one in placed or one not in by_name for one in task.depends_on)]
        placed |= {task.name: task for task in ready}
        waiting = [task for task in waiting if task.name not in placed]
    return list(placed.values())


def find_cycle(needs: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Names along a cycle, its first one also last; None when there is none. Not by recursion: it may be deep."""
    left = {name: set(needed) for name, needed in needs.items()}
    followers: dict[str, list[str]] = {name: [] for name in needs}
    for name, needed in left.items():
        for one in needed:
            followers[one].append(name)
    free = [name for name, needed in left.items() if not needed]
    while free:
        name = free.pop()
        del left[name]
        for follower in followers[name]:
            left[follower].discard(name)
            if not left[follower]:
                free.append(follower)
    if not left:
        return None
    path = [next(name for name in needs if name in left)]
    while path.count(path[-1]) < 2:
        path.append(next(one for one in needs[path[-1]] if one in left))
    return path[path.index(path[-1]) :]


def task_id(workflow_id: str, name: str) -> str:
    """The id of a task's job: the same for the same names, so that nothing is made twice."""
    plain = f"{workflow_id}.{name}"
    return plain if len(plain) <= MAX_NAME else f"{workflow_id}.{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def new_workflow_id() -> str:
    return fresh_id("flow")


@dataclass(frozen=True)
class Progress:
    """Of a workflow's tasks, how many ended and how."""

    total: int
    done: int = 0
    failed: int = 0
    cancelled: int = 0

    def plus(self, *, total: int = 0, done: int = 0, failed: int = 0, cancelled: int = 0) -> Progress:
        return Progress(self.total + total, self.done + done, self.failed + failed, self.cancelled + cancelled)

    @property
    def completed(self) -> int:
        return self.done + self.failed + self.cancelled

    @property
    def over(self) -> bool:
        return self.completed >= self.total


def counted_as(status: Status) -> str:
    """Under which count a task stands that ended so."""
    return "done" if status in GOOD else "cancelled" if status is Status.CANCELLED else "failed"
