"""What a server answers, as it comes: JSON objects, with the names of the HTTP interface. Times are ISO 8601 in UTC.

A newer server may send more than stands here; nothing is taken away or renamed.
"""

# Without `annotations` from the future: those would keep Python from seeing which keys are not required.
from typing import Any, Literal, NotRequired, TypedDict

JobStatus = Literal["pending", "claimed", "running", "done", "skipped", "failed", "cancelled", "dead_letter"]
PoolStatus = Literal["starting", "running", "draining", "stopped", "evicted"]
WorkflowStatus = Literal["running", "done", "failed", "cancelled"]


class Problem(TypedDict):
    """Why something was refused; decide by `code`."""

    status: int
    code: str
    detail: str
    retry_after: NotRequired[float]
    field: NotRequired[str]


class Submitted(TypedDict):
    """`status` and `created` of a job that is stored; `error` of one that was refused."""

    job_id: str
    status: NotRequired[JobStatus]
    created: NotRequired[bool]
    error: NotRequired[Problem]


class Job(TypedDict):
    """The record of a job. Lists and `as_completed` leave out the `payload`; only done jobs have a `result`."""

    job_id: str
    type: str
    status: JobStatus
    agent: str
    pool_id: str
    model_id: str | None
    priority: int
    min_memory_mb: int | None
    gpu_count: int
    cpu_fallback: bool
    cost_units: float | None
    expected_duration_sec: float | None
    max_runtime_sec: float | None
    max_attempts: int
    deadline_at: str | None
    tags: list[str]
    concurrency_keys: list[str]
    constraints: dict[str, Any] | None
    attempt: int
    attempts: int
    crashes: int
    redrives: int
    not_before: str | None
    blocked_on: str | None
    wait_reason: str | None
    worker_id: str | None
    progress: float | None
    progress_note: str | None
    cancel_requested_at: str | None
    stop_seconds: float | None
    created_at: str
    claimed_at: str | None
    started_at: str | None
    finished_at: str | None
    error_kind: str | None
    last_error: str | None
    payload: NotRequired[dict[str, Any]]
    result: NotRequired[Any]
    run_seconds: NotRequired[float]


class Cancelled(TypedDict):
    """`status` is `cancelled`, or that of a job whose worker was asked to stop it."""

    job_id: str
    status: JobStatus
    cancel_requested: bool


class Retried(TypedDict):
    job_id: str
    status: JobStatus
    redrives: int


class Prioritized(TypedDict):
    job_id: str
    status: JobStatus
    priority: int
    before: int


class Event(TypedDict):
    id: int
    event_type: str
    attempt: int | None
    worker_id: str | None
    actor: str | None
    details: dict[str, Any] | None
    ts: str


class Explanation(TypedDict):
    """Why a job does not run. What `lasts` does not pass by itself: somebody has to do something."""

    job_id: str
    status: JobStatus
    reason: str
    message: str
    lasts: bool
    position: int | None
    position_is_at_least: bool
    estimated_start_in_seconds: float | None
    at: str
    evidence: dict[str, Any]


class Stats(TypedDict):
    status: dict[str, int]
    pools: dict[str, dict[str, int]]
    agents: dict[str, dict[str, int]]
    oldest_pending_seconds: float | None
    at_least: list[str]


class Lease(TypedDict):
    """One that is held, without the token that opens it."""

    lease: str
    agent_name: str
    mode: str
    state: str
    node_id: str | None
    #: Of each of its GPUs.
    memory_mb: int
    #: All of them: `gpu_uuid`, `gpu_index`.
    gpus: list[dict[str, Any]]
    expires_at: str


class Pool(TypedDict):
    pool_id: str
    status: PoolStatus
    status_reason: str | None
    type: str | None
    model_id: str | None
    desired_workers: int
    min_workers: int
    max_workers: int | None
    slots: int
    hold_seconds: int
    metadata: dict[str, Any] | None
    created: NotRequired[bool]
    assignments: NotRequired[list[dict[str, Any]]]
    members: NotRequired[list[dict[str, Any]]]


class PoolState(TypedDict):
    """Of a pool that should end; `already`: it was stopped or evicted before, and nothing was changed."""

    pool_id: str
    status: PoolStatus
    already: bool


class Deleted(TypedDict):
    pool_id: str
    deleted: bool


class DeadLetter(TypedDict):
    job_id: str
    type: str
    agent: str
    pool_id: str
    reason: str
    attempts: int
    redrives: int
    buried_at: str
    last_error: str | None


class Redriven(TypedDict):
    matched: int
    exhausted: int
    redriven: int
    dry_run: bool
    would_be: NotRequired[int]
    sample: NotRequired[list[str]]
    unknown: NotRequired[list[str]]


class Purged(TypedDict):
    matched: int
    purged: int
    dry_run: bool
    would_be: NotRequired[int]
    sample: NotRequired[list[str]]
    unknown: NotRequired[list[str]]


class Added(TypedDict):
    """Which tasks are new."""

    workflow_id: str
    added: list[str]


class Workflow(TypedDict):
    """`progress` counts tasks: `completed` of `total`, and how they ended. A cancel answers id and status alone."""

    workflow_id: str
    status: WorkflowStatus
    name: NotRequired[str | None]
    agent: NotRequired[str]
    progress: NotRequired[dict[str, int]]
    tasks: NotRequired[list[dict[str, Any]]]
    created: NotRequired[bool]
