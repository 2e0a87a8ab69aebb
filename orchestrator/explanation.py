"""Why a job does not run: the one reason that stands before all others, and what it rests on.

Pure: facts go in, an answer comes out. The facts come from the functions that publish, claim and place
(`store.explanation`), so what is said here is what they do. Reasons are asked in the order in which they would stop the
job: nobody is told of GPU memory whose pool is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from orchestrator.jobs import DEFAULT_LANE, OWNED, TERMINAL, Queued, Status
from orchestrator.placement import Ask, GpuView, Placed, Refused, refusal, too_large_for_all
from orchestrator.policies import WAITS_FOR_CAP, resume_command
from orchestrator.pools import ASLEEP
from orchestrator.wording import telling_line

#: GPUs that are shown as evidence: enough to understand it, whatever the size of the cluster.
MOST_GPUS = 64
#: Types of jobs that are named beside the one that nobody runs.
MOST_TYPES = 12
#: From here on a moment is told by the clock: nobody counts so many seconds.
MANY_SECONDS = 3600.0
#: Seconds in which free slots read what is announced to them, were its entry lost and announced again too.
UNREAD_S = 30.0


class Why(StrEnum):
    """Stable codes; the text beside them is for people."""

    ENDED = "ended"
    RUNNING = "running"
    STOPPING = "stopping"
    POOL_CLOSED = "pool_closed"
    PAUSED = "paused"
    CAP_FULL = "cap_full"
    TASKS = "tasks"
    BLOCKED = "blocked"
    NOT_BEFORE = "not_before"
    RETRY_PAUSE = "retry_pause"
    POOL_ASLEEP = "pool_asleep"
    NO_WORKER = "no_worker"
    NO_HANDLER = "no_handler"
    TROUBLE = "trouble"
    NO_GPU_NODE = "no_gpu_node"
    TOO_LARGE = "too_large"
    NO_GPU = "no_gpu"
    DEFERRED = "deferred"
    UNREAD = "unread"
    NEXT = "next"
    IN_LINE = "in_line"


@dataclass(frozen=True)
class Team:
    """Live workers of the lane that run the same types."""

    types: frozenset[str]
    has_gpus: bool
    slots: int
    busy: int
    #: Slots that should be reading the lane now.
    idle: int = 0
    #: Why they do not do what they should; what one of them says.
    trouble: str | None = None


@dataclass(frozen=True)
class Cap:
    key: str
    in_use: int
    most: int

    @property
    def full(self) -> bool:
        return self.in_use >= self.most


@dataclass(frozen=True)
class Facts:
    """What was found out about one job, at one moment."""

    job: Mapping[str, Any]
    #: Seconds until `not_before`; 0 when that is over.
    due_in_s: float = 0.0
    #: Seconds since it was announced; 0 when it is not.
    announced_s: float = 0.0
    pool_state: str | None = None
    #: Why an open pool is not as it should be; and nodes that are drained, if nobody serves the lane.
    pool_reason: str | None = None
    drained: Sequence[str] = ()
    #: By key, why an operator paused it.
    pauses: Mapping[str, str] = field(default_factory=dict)
    caps: Sequence[Cap] = ()
    #: What the leader saw last at the gate it waits at; None: it waits at none.
    gate: str | None = None
    #: Of those it waits for, the first that were found, and where they stand; None: it waits for no task.
    tasks: Sequence[tuple[str, str]] | None = None
    teams: Sequence[Team] = ()
    #: What it asks of the GPUs of those workers; None: it needs no GPU memory, as far as is known.
    ask: Ask | None = None
    #: What placement says to that now; None where the need is not its own: its pool may keep the model loaded.
    placement: Placed | Refused | None = None
    gpus: Sequence[GpuView] = ()
    #: All GPUs of the cluster, whoever works there; with `may_grow`, nodes come with workers and may have others.
    known: Sequence[GpuView] = ()
    may_grow: bool = False
    #: Idle slots that keep its model in memory.
    warm_slots: int = 0
    #: Jobs of the lane before it; with `ahead_at_least`, there may be more.
    ahead: int = 0
    ahead_at_least: bool = False
    #: Mean seconds of the lane's last jobs, and for how long those that run have by now; None when there are none.
    run_s: float | None = None
    running_s: float | None = None

    @property
    def able(self) -> list[Team]:
        return [team for team in self.teams if self.job["type"] in team.types]

    @property
    def slots(self) -> int:
        return sum(team.slots for team in self.able)

    @property
    def free_slots(self) -> int:
        return sum(max(team.slots - team.busy, 0) for team in self.able)

    @property
    def idle(self) -> int:
        return sum(team.idle for team in self.able)

    @property
    def full_cap(self) -> Cap | None:
        return next((cap for cap in self.caps if cap.full), None)


@dataclass(frozen=True)
class Explanation:
    reason: Why
    message: str
    position: int | None = None
    starts_in_s: float | None = None

    @property
    def lasts(self) -> bool:
        """Whether this keeps the job waiting until somebody does something."""
        return self.reason in _LASTING


def explain(facts: Facts) -> Explanation:
    """The dominant reason, the place in line and an estimate, where there is one."""
    status = Status(facts.job["status"])
    if status in TERMINAL or status in OWNED:
        return Explanation(*_no_longer_waits(facts, status))
    reason, message = next(found for ask in _QUESTIONS if (found := ask(facts)) is not None)
    in_line = reason in (Why.NEXT, Why.IN_LINE)
    position = facts.ahead + 1 if in_line or reason in _STILL_IN_LINE else None
    return Explanation(reason, message, position, _starts_in(facts, reason) if facts.slots else None)


#: Reasons that last until somebody does something.
_LASTING = frozenset(
    {
        Why.POOL_CLOSED,
        Why.PAUSED,
        Why.NO_WORKER,
        Why.NO_HANDLER,
        Why.TROUBLE,
        Why.NO_GPU_NODE,
        Why.TOO_LARGE,
        Why.UNREAD,
    }
)
#: What stops it is not its own: it keeps its place meanwhile.
_STILL_IN_LINE = _LASTING | {Why.POOL_ASLEEP, Why.NO_GPU}
#: Reasons that end by themselves, with time or with the jobs before it.
_PASSING = frozenset({Why.NEXT, Why.IN_LINE, Why.NOT_BEFORE, Why.RETRY_PAUSE, Why.DEFERRED, Why.CAP_FULL})

Found = tuple[Why, str] | None


def _no_longer_waits(facts: Facts, status: Status) -> tuple[Why, str]:
    job = facts.job
    if status in TERMINAL:
        return Why.ENDED, f"it ended as {status}" + (
            f": {telling_line(job['last_error'])}" if job.get("last_error") else ""
        )
    where = f"attempt {job['attempt']} on worker {job['worker_id']}"
    if job.get("cancel_requested_at"):
        return Why.STOPPING, f"it was cancelled; {where} is being stopped"
    return Why.RUNNING, f"it runs: {where}"


def _pool_closed(facts: Facts) -> Found:
    if facts.pool_state is None:
        return None
    return Why.POOL_CLOSED, f"pool {facts.job['lane']} is {facts.pool_state}; create it again, or cancel the job"


def _paused(facts: Facts) -> Found:
    for key, reason in facts.pauses.items():
        told = f"an operator paused {key}" + (f": {reason}" if reason else "")
        return Why.PAUSED, f"{told}; `{resume_command(key)}`"
    return None


def _blocked(facts: Facts) -> Found:
    """Parked until something lets it go. A cap is named with its numbers of now; the rest says why itself."""
    if facts.job["queued"] != Queued.BLOCKED:
        return None
    on = facts.job["blocked_on"]
    cap = next((cap for cap in facts.caps if WAITS_FOR_CAP + cap.key == on), None)
    if cap is not None:
        return Why.CAP_FULL, f"{cap.in_use} of {cap.most} jobs with key {cap.key} run; it waits for one of them to end"
    if facts.tasks is not None:
        named = ", ".join(f"{name} ({status})" for name, status in facts.tasks)
        more = (facts.job["waits_for"] or 0) - len(facts.tasks)
        if not named:
            return Why.TASKS, f"it waits for {more} of the tasks that it needs"
        return Why.TASKS, f"it waits for tasks: {named}" + (f" and {more} more" if more > 0 else "")
    told = facts.job["wait_reason"] or f"it waits for {on}"
    return Why.BLOCKED, f"{told}; by now: {facts.gate}" if facts.gate else told


def _delayed(facts: Facts) -> Found:
    job = facts.job
    if job["queued"] != Queued.DELAYED:
        return None
    soon = _when(facts)
    if job["wait_reason"]:
        # What was true when it was put off may be so no more; what would not let it run now is told first.
        by_now = _no_worker(facts) or _no_handler(facts) or _trouble(facts) or _no_gpu(facts)
        return by_now or (Why.DEFERRED, f"{job['wait_reason']}; it is offered again {soon}")
    if job["attempts"]:
        failed = f"attempt {job['attempts']} of {job['max_attempts']} failed ({job['error_kind']})"
        return Why.RETRY_PAUSE, f"{failed}; the next begins {soon}"
    return Why.NOT_BEFORE, f"it was submitted for later; it is due {soon}"


def _when(facts: Facts) -> str:
    if facts.due_in_s <= 0:
        return "at any moment"
    if facts.due_in_s < MANY_SECONDS:
        return f"in {facts.due_in_s:.1f} s"
    return f"at {facts.job['not_before']:%Y-%m-%d %H:%M:%S} UTC"


def _no_worker(facts: Facts) -> Found:
    if facts.teams:
        return None
    lane = facts.job["lane"]
    if facts.pool_reason == ASLEEP:
        return Why.POOL_ASLEEP, f"pool {lane} has no workers while nobody needs it; they are started now"
    if facts.pool_reason:
        return Why.NO_WORKER, f"no live worker serves pool {lane}: {facts.pool_reason}"
    if facts.drained:
        names, one = ", ".join(facts.drained), facts.drained[0] if len(facts.drained) == 1 else "NODE"
        return Why.NO_WORKER, f"no live worker serves pool {lane}; drained: {names} (gpuorch nodes resume {one})"
    start = f"start one: gpuorch worker --pool {lane}"
    if lane != DEFAULT_LANE:
        start += f", or let those that serve any have it: gpuorch pools create {lane} --type {facts.job['type']}"
    start += "; if one runs, its log says why it does not come up"
    return Why.NO_WORKER, f"no live worker serves pool {lane}; {start}"


def _no_handler(facts: Facts) -> Found:
    if facts.able:
        return None
    kind, lane = facts.job["type"], facts.job["lane"]
    known = sorted({name for team in facts.teams for name in team.types})
    have = ", ".join(known[:MOST_TYPES]) + (", …" if len(known) > MOST_TYPES else "")
    found = f"no live worker of pool {lane} has a handler for type {kind!r} (they have: {have or 'none'})"
    start = f"start one that has: gpuorch worker --pool {lane} --handlers MODULE"
    # A worker of its own is refused beside that one: it has its data to itself.
    start += " (with make run: ORCH_WORKER_HANDLERS=MODULE make run)"
    return Why.NO_HANDLER, f"{found}; {start}"


def _trouble(facts: Facts) -> Found:
    """Heartbeats go to the database: workers that get nothing done count as alive, and say why."""
    told = [team.trouble for team in facts.able]
    return (Why.TROUBLE, f"no worker that could run it is well: {told[0]}") if all(told) else None


def _cap_full(facts: Facts) -> Found:
    cap = facts.full_cap
    return None if cap is None else (Why.CAP_FULL, f"{cap.in_use} of {cap.most} jobs with key {cap.key} run")


def _no_gpu(facts: Facts) -> Found:
    if facts.job["cpu_fallback"] or facts.warm_slots:
        return None
    if facts.ask and not any(team.has_gpus for team in facts.able):
        none = "no node with a worker that could run it has a GPU" if facts.known else "no node has a GPU"
        return Why.NO_GPU_NODE, f"{none}: start a worker where there is one, or submit with --cpu-fallback"
    if facts.ask and not facts.may_grow and (too_large := too_large_for_all(facts.ask, facts.known)):
        return Why.TOO_LARGE, too_large
    return (Why.NO_GPU, facts.placement.reason) if isinstance(facts.placement, Refused) else None


def _unread(facts: Facts) -> Found:
    """Those before it may keep it waiting, unless there are idle slots for them too, or none of them runs."""
    if facts.announced_s < UNREAD_S or not facts.idle:
        return None
    if facts.running_s is not None and facts.ahead >= facts.idle:
        return None
    told = f"it was announced {facts.announced_s:.0f} s ago and read by nobody; {facts.idle} slots are idle"
    return Why.UNREAD, f"{told}: do their workers use the same redis_url and stream_prefix (runbook redis-lost)?"


def _in_line(facts: Facts) -> Found:
    least = "at least " if facts.ahead_at_least else ""
    free = facts.free_slots
    if facts.job["queued"] == Queued.ANNOUNCED:
        return Why.NEXT, f"it is announced, {facts.ahead} before it; {free} of {facts.slots} slots are free"
    return Why.IN_LINE, f"{least}{facts.ahead} jobs are before it; {free} of {facts.slots} slots are free"


_QUESTIONS: tuple[Callable[[Facts], Found], ...] = (
    _pool_closed,
    _paused,
    _blocked,
    _delayed,
    _no_worker,
    _no_handler,
    _trouble,
    _cap_full,
    _no_gpu,
    _unread,
    _in_line,
)


def _starts_in(facts: Facts, reason: Why) -> float | None:
    """When its turn comes if the jobs before it take as long as the last ones did; None when nobody can know.

    Of those that run now at least as long as they have already: brief ones that ended say nothing of a long one.
    """
    if reason not in _PASSING:
        return None
    at_once = facts.slots
    to_end = facts.ahead + (not facts.free_slots)
    if cap := facts.full_cap:
        at_once = min(at_once, cap.most)
        to_end = facts.ahead + 1
    known = [seconds for seconds in (facts.run_s, facts.running_s) if seconds is not None]
    if to_end and not (known and at_once):
        return None
    turns_s = to_end / at_once * max(known) if to_end else 0.0
    return round(max(facts.due_in_s, turns_s), 3)


def as_document(facts: Facts, answer: Explanation, now: datetime) -> dict[str, Any]:
    """As clients see it."""
    job = facts.job
    return {
        "job_id": job["job_id"],
        "status": job["status"],
        "reason": answer.reason,
        "message": answer.message,
        "lasts": answer.lasts,
        "position": answer.position,
        "position_is_at_least": facts.ahead_at_least if answer.position else False,
        "estimated_start_in_seconds": answer.starts_in_s,
        "at": now,
        "evidence": {
            "queued": job["queued"],
            "pool_id": job["lane"],
            "pool_state": facts.pool_state,
            "not_before": job["not_before"],
            "blocked_on": job["blocked_on"],
            "gate": facts.gate,
            "tasks": [{"task": name, "status": status} for name, status in facts.tasks or ()],
            "wait_reason": job["wait_reason"],
            "paused": dict(facts.pauses),
            "caps": [{"key": cap.key, "in_use": cap.in_use, "max": cap.most} for cap in facts.caps],
            "workers": [
                {"types": sorted(team.types), "has_gpus": team.has_gpus, "slots": team.slots, "busy": team.busy}
                for team in facts.teams
            ],
            "warm_slots": facts.warm_slots,
            "needed_mb": facts.ask.memory_mb if facts.ask else job["min_memory_mb"],
            "gpus": _gpus(facts),
            "mean_run_seconds": facts.run_s,
        },
    }


def _gpus(facts: Facts) -> list[dict[str, Any]]:
    """Free memory of each GPU, and what stands against it."""
    if facts.ask is None:
        return []
    answers = [(gpu, refusal(gpu, facts.ask)) for gpu in facts.gpus[:MOST_GPUS]]
    return [
        {
            "gpu_uuid": gpu.gpu_uuid,
            "node_id": gpu.node_id,
            "free_mb": gpu.free_mb,
            "usable_mb": gpu.usable_mb,
            "against": against and against[0],
        }
        for gpu, against in answers
    ]
