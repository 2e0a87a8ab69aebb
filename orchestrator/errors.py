"""Every error the system names, as one tree.

OrchestratorError
├── ConfigError            config_invalid        settings cannot be used; nothing was started
│   └── ServerTooOld       server_too_old        the database or Redis is older than this works with
├── InvalidInput           invalid_input         the request is wrong; nothing was written
│   ├── PayloadTooLarge    payload_too_large
│   └── UnknownDuty        unknown_duty
├── NotFound               not_found
│   ├── JobNotFound        job_not_found
│   ├── ResultNotFound     result_not_found
│   ├── LeaseNotFound      lease_not_found
│   ├── GpuNotFound        gpu_not_found
│   ├── PoolNotFound       pool_not_found
│   ├── NodeNotFound       node_not_found
│   ├── LaneNotFound       lane_not_found
│   ├── PolicyNotFound     policy_not_found
│   ├── ScheduleNotFound   schedule_not_found
│   ├── WorkerNotFound     worker_not_found
│   └── WorkflowNotFound   workflow_not_found
├── JobConflict            job_conflict          same job_id, other content
├── JobEnded               job_ended             too late to cancel it
├── JobNotWaiting          job_not_waiting       too late to move it in its lane: it is owned or over
├── JobCancelled           job_cancelled         the job was cancelled; what its worker reports does not count
├── NotOwner               not_owner             the attempt does not own the job; stop it, nothing was written
├── NotRedrivable          not_redrivable        only a job that ended badly can be started over
├── RedriveLimit           redrive_limit         it was started over as often as allowed
├── TaskOfWorkflow         task_of_workflow      a task starts over with its workflow, not by itself
├── WorkflowConflict       workflow_conflict     same workflow_id, other content
├── WorkflowEnded          workflow_ended        it runs no more: no task can be added, nothing is left to cancel
├── WorkflowBusy           workflow_busy         its tasks are stopped, run or deleted just now; try again later
├── WorkflowGrown          workflow_grown        a task that added tasks cannot run again: it would add them twice
├── LeaseEnded             lease_ended           the lease expired or was released; ask for a new one
├── PoolExists             pool_exists           same pool_id, other content
├── PoolClosed             pool_closed           the pool is draining, stopped or evicted
├── PoolBusy               pool_busy             only a closed pool without workers can be deleted
├── NotLeader              not_leader            another instance leads; ask that one
├── Overloaded             overloaded            too much waits already; try again later
│   ├── RateLimited        rate_limited          the agent submits more than its policy allows; wait as told
│   ├── GateClosed         gate_closed           a gate of the admission policy is closed to this job
│   ├── QueueFull          queue_full            as many jobs wait in this lane as may
│   └── AgentLimit         agent_limit           this agent has as much in flight as it may
├── Paused                 paused                an operator paused what this job belongs to
├── Aborted                aborted               whoever asked cancelled it; what had begun was let end
├── StaleEpoch             stale_epoch           another leader took over; this write had no effect
├── WorkerExists           worker_exists         a worker with this id is alive, or something of it is left
├── WorkerLost             worker_lost           the leader gave this worker's jobs away
└── Unavailable            unavailable           a server does not answer; nothing is known to be lost
    ├── DatabaseUnavailable  database_unavailable
    ├── RedisUnavailable     redis_unavailable
    ├── GpuUnavailable       gpu_unavailable       a GPU or its driver cannot be asked; nothing may start there
    ├── KubernetesUnavailable  kubernetes_unavailable
    └── NoThreads            no_threads            the machine lets this process start no thread

`code` is part of the HTTP contract: it never changes meaning.
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Base of all errors that a caller may see."""

    code = "internal_error"

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(OrchestratorError):
    code = "config_invalid"


class ServerTooOld(ConfigError):
    code = "server_too_old"

    def __init__(self, where: str, version: str, needed: str, setting: str) -> None:
        super().__init__(f"{where} has version {version}, this needs {needed}; upgrade it, or name another: {setting}")


class InvalidInput(OrchestratorError):
    code = "invalid_input"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PayloadTooLarge(InvalidInput):
    code = "payload_too_large"


class UnknownDuty(InvalidInput):
    code = "unknown_duty"


class NotFound(OrchestratorError):
    code = "not_found"


class JobNotFound(NotFound):
    code = "job_not_found"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job {job_id!r}; it was never accepted here, or is not kept any more")


class ResultNotFound(NotFound):
    code = "result_not_found"

    def __init__(self, job_id: str, status: str) -> None:
        lost = " any more: results are kept for retention_results_s" if status == "done" else ""
        super().__init__(f"job {job_id!r} is {status} and has no result{lost}")
        self.status = status


class LeaseNotFound(NotFound):
    code = "lease_not_found"

    def __init__(self) -> None:
        super().__init__("no lease has this token; `gpuorch leases list` shows what is leased, POST /leases gives one")


class JobConflict(OrchestratorError):
    code = "job_conflict"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id!r} exists with other content; use a new job_id")


class JobEnded(OrchestratorError):
    code = "job_ended"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"job {job_id!r} is {status} already; there is nothing left to cancel")


class JobNotWaiting(OrchestratorError):
    code = "job_not_waiting"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"job {job_id!r} is {status}; a priority only matters while a job waits, nothing was changed")


class JobCancelled(OrchestratorError):
    code = "job_cancelled"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id!r} was cancelled and has ended as that; what its attempt reports does not count")


class NotOwner(OrchestratorError):
    code = "not_owner"

    def __init__(self, job_id: str, attempt: int, worker_id: str, status: str) -> None:
        who = f"attempt {attempt} of worker {worker_id}"
        super().__init__(f"{who} does not own job {job_id!r}, which is {status}; stop it, nothing was written")


class NotRedrivable(OrchestratorError):
    code = "not_redrivable"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"job {job_id!r} is {status}; only failed, cancelled and dead-lettered jobs start over")


class RedriveLimit(OrchestratorError):
    code = "redrive_limit"

    def __init__(self, job_id: str, limit: int) -> None:
        super().__init__(f"job {job_id!r} was started over {limit} times; mend its cause and submit it under a new id")


class TaskOfWorkflow(OrchestratorError):
    code = "task_of_workflow"

    def __init__(self, job_id: str, workflow_id: str) -> None:
        super().__init__(
            f"job {job_id!r} is a task of workflow {workflow_id!r}; start it over there:"
            f" POST /workflows/{workflow_id}/retry_failed, or /rerun"
        )


class WorkflowNotFound(NotFound):
    code = "workflow_not_found"

    def __init__(self, workflow_id: str) -> None:
        super().__init__(f"no workflow {workflow_id!r}; `gpuorch workflows list` shows those there are")


class WorkflowConflict(OrchestratorError):
    code = "workflow_conflict"

    def __init__(self, workflow_id: str) -> None:
        super().__init__(f"workflow {workflow_id!r} exists with other content; use a new workflow_id")


class WorkflowEnded(OrchestratorError):
    code = "workflow_ended"

    def __init__(self, workflow_id: str, status: str) -> None:
        super().__init__(f"workflow {workflow_id!r} is {status}; nothing was changed")


class WorkflowBusy(OrchestratorError):
    code = "workflow_busy"

    def __init__(self, workflow_id: str, why: str) -> None:
        super().__init__(f"workflow {workflow_id!r}: {why}; nothing was changed, try again when that is over")


class WorkflowGrown(OrchestratorError):
    code = "workflow_grown"

    def __init__(self, workflow_id: str, task: str) -> None:
        super().__init__(
            f"workflow {workflow_id!r}: task {task} has added tasks, and would add them a second time; nothing was"
            " changed, make a new workflow of what is to run again"
        )


class LeaseEnded(OrchestratorError):
    code = "lease_ended"

    def __init__(self, state: str, reason: str | None = None) -> None:
        why = f" ({reason})" if reason else ""
        super().__init__(f"this lease is {state}{why}; stop using its GPU and request a new one")


class GpuNotFound(NotFound):
    code = "gpu_not_found"

    def __init__(self, uuid: str) -> None:
        super().__init__(f"no GPU {uuid!r}; `gpuorch gpus` shows those that are known, by their UUIDs")


class PoolNotFound(NotFound):
    code = "pool_not_found"

    def __init__(self, pool_id: str) -> None:
        super().__init__(f"no pool {pool_id!r}; `gpuorch pools list` shows those there are")


class LaneNotFound(NotFound):
    """Neither pool nor worker nor job of this name is known: a slip of the pen must not read as "nothing to do"."""

    code = "lane_not_found"

    def __init__(self, lane: str) -> None:
        super().__init__(
            f"no pool, worker or job is known in lane {lane!r}; `gpuorch queue stats` shows those with jobs"
        )


class NodeNotFound(NotFound):
    code = "node_not_found"

    def __init__(self, node_id: str) -> None:
        super().__init__(f"no node {node_id!r}; `gpuorch nodes list` shows those that were heard of")


class PolicyNotFound(NotFound):
    code = "policy_not_found"

    def __init__(self, scope: str, name: str) -> None:
        super().__init__(f"no policy of {scope} {name!r}; `gpuorch policy list {scope}` shows those there are")


class ScheduleNotFound(NotFound):
    code = "schedule_not_found"

    def __init__(self, schedule_id: str) -> None:
        super().__init__(f"no schedule {schedule_id!r}; `gpuorch schedules list` shows those there are")


class PoolExists(OrchestratorError):
    code = "pool_exists"

    def __init__(self, pool_id: str) -> None:
        how = f"`gpuorch pools scale` or `pools swap` (PATCH /workers/pool/{pool_id})"
        super().__init__(f"pool {pool_id!r} exists and is another; change it with {how}")


class PoolClosed(OrchestratorError):
    code = "pool_closed"

    def __init__(self, pool_id: str, status: str) -> None:
        super().__init__(f"pool {pool_id!r} is {status}; once it is stopped or evicted it can be created again")


class PoolBusy(OrchestratorError):
    code = "pool_busy"

    def __init__(self, pool_id: str, status: str) -> None:
        super().__init__(
            f"pool {pool_id!r} is {status}; it can be deleted once it is stopped or evicted and its workers have left"
        )


class NotLeader(OrchestratorError):
    code = "not_leader"

    def __init__(self, holder: str | None) -> None:
        super().__init__(f"{holder} leads, not this instance" if holder else "nobody leads at the moment; try again")
        self.holder = holder


class WorkerNotFound(NotFound):
    code = "worker_not_found"

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"no worker {worker_id!r} came over HTTP; begin with POST /workers/register")


class Overloaded(OrchestratorError):
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    code = "rate_limited"

    def __init__(self, agent: str, rate: float, retry_after_s: float) -> None:
        allowed = f"agent {agent!r} may submit {rate:g} jobs a second"
        super().__init__(f"{allowed}; try again in {retry_after_s:.3f} seconds", retry_after_s)


class GateClosed(Overloaded):
    code = "gate_closed"


class QueueFull(Overloaded):
    code = "queue_full"


class AgentLimit(Overloaded):
    code = "agent_limit"


class Paused(OrchestratorError):
    code = "paused"

    def __init__(self, key: str, reason: str, remedy: str, retry_after_s: float = 30.0) -> None:
        what = "all jobs are" if key == "global" else f"{key} is"
        why = f": {reason}" if reason else ""
        super().__init__(f"{what} paused{why}; submit again when it is resumed: {remedy}")
        self.retry_after_s = retry_after_s


class Aborted(OrchestratorError):
    code = "aborted"

    def __init__(self, reason: str = "") -> None:
        super().__init__(
            f"cancelled{f': {reason}' if reason else ''}; what had begun was let end, nothing was begun since"
        )
        self.reason = reason


class StaleEpoch(OrchestratorError):
    code = "stale_epoch"

    def __init__(self, epoch: int, newest: int = 0) -> None:
        super().__init__(f"epoch {epoch} no longer leads; the write was refused")
        #: The epoch that refused it, where that is known.
        self.newest = newest


class WorkerExists(OrchestratorError):
    code = "worker_exists"

    def __init__(self, worker_id: str) -> None:
        why = "is alive, is not of those that come over HTTP, or jobs or leases of it are left"
        super().__init__(f"worker {worker_id!r} {why}; wait for its timeout, or leave worker_id out to get a new one")


class WorkerLost(OrchestratorError):
    code = "worker_lost"

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"worker {worker_id} was declared dead; its jobs run elsewhere")


class Unavailable(OrchestratorError):
    code = "unavailable"


class DatabaseUnavailable(Unavailable):
    code = "database_unavailable"


class RedisUnavailable(Unavailable):
    """`answered`: the server is there and refused; its other keys may be well."""

    code = "redis_unavailable"

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class GpuUnavailable(Unavailable):
    """Not an answer about memory: whoever gets it must not start anything on that GPU."""

    code = "gpu_unavailable"


class KubernetesUnavailable(Unavailable):
    """The API of Kubernetes does not answer, or refuses: a Deployment keeps the replicas it has.

    `answered`: it is there, and its answer is about this Deployment; others may be well.
    """

    code = "kubernetes_unavailable"

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class NoThreads(Unavailable):
    code = "no_threads"

    def __init__(self, name: str, cause: object) -> None:
        super().__init__(f"no thread for {name!r} ({cause}); raise the limit of processes and threads, or run fewer")
