"""What a server has, each with its operations: jobs, pools, dead letters, workflows, and who holds leases."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.client.answers import (
    Added,
    Cancelled,
    DeadLetter,
    Deleted,
    Event,
    Explanation,
    Job,
    Lease,
    Pool,
    PoolState,
    Prioritized,
    Purged,
    Redriven,
    Retried,
    Stats,
    Submitted,
    Workflow,
)
from orchestrator.client.errors import NotEnded
from orchestrator.client.operations import Door, Noun, operation, streaming
from orchestrator.client.paths import job_path, pool_path, workflow_path
from orchestrator.client.patience import Patience
from orchestrator.client.steps import BULK_S, NOTHING, TIMEOUT_S, Emit, Emits, Operation, Pause, Request
from orchestrator.client.submitting import PATIENCE_S, JobBody, Submitting
from orchestrator.client.submitting import Jobs as Many
from orchestrator.client.wondering import Wondering
from orchestrator.errors import JobNotFound
from orchestrator.jobs import TERMINAL
from orchestrator.workflows import new_workflow_id

#: Seconds of one long poll; a server allows 60 unless told otherwise, and proxies often cut at 30 to 60.
POLL_S = 25.0
#: Jobs that one request asks about, and the seconds it waits where there are more: the others have their turn.
ASK_ABOUT, TURN_S = 1000, 1.0
#: Seconds between two looks at a workflow: the first, and at most.
LOOK_S, LOOK_MAX_S = 0.2, 5.0
#: Rows of one page.
PAGE = 500


class Polite(Noun[Door]):
    """Asks as `patience` says."""

    def __init__(self, door: Door, patience_s: float) -> None:
        super().__init__(door)
        self._patience_s = patience_s

    def _ask(self, request: Request, left_s: float = float("inf")) -> Operation[Any]:
        return Patience(self._door.contact, min(self._patience_s, left_s)).insist(request)

    def _read(
        self, path: str, params: Mapping[str, object] = NOTHING, wait_s: float = 0.0, left_s: float = float("inf")
    ) -> Operation[Any]:
        return self._ask(Request("GET", path, params, timeout_s=TIMEOUT_S + wait_s, repeatable=True), left_s)

    def _post(
        self, path: str, body: Mapping[str, object] | None = None, *, repeatable: bool, wait_s: float = 0.0
    ) -> Operation[Any]:
        return self._ask(Request("POST", path, body=body, timeout_s=TIMEOUT_S + wait_s, repeatable=repeatable))

    def _pages(self, path: str, noun: str, filters: Mapping[str, object]) -> Emits[Any]:
        cursor = None
        while True:
            page = yield from self._read(path, {**filters, "limit": PAGE, "cursor": cursor})
            for row in page[noun]:
                yield Emit(row)
            cursor = page["next_cursor"]
            if cursor is None:
                return


class JobsOf(Polite[Door]):
    """The jobs of a server. Raises Refused or ServerUnreachable, as all of its kind do."""

    @operation
    def submit(self, job: JobBody, *, patience_s: float = PATIENCE_S) -> Operation[Submitted]:
        """Submit one job, waiting while the server says "later". The same id and content again is the same job."""
        return Submitting.one.steps(Submitting(self._door, patience_s), job)

    @operation
    def submit_many(
        self,
        jobs: Many,
        *,
        threads: int = 1,
        patience_s: float = PATIENCE_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> Operation[list[Submitted]]:
        """Submit all of them and return the answers, in order. `jobs` may be any iterable, and is taken lazily.

        They go in batches, one after the other and so in order, or `threads` at a time (0: as many as suits the
        machine). A server that says "later" is asked again then, for up to `patience_s` seconds since a job got in;
        `on_wait` is told why, by whichever thread waits.
        Raises JobsRefused, whose `answers` say which got in, and ServerUnreachable. Jobs with ids of your own may be
        sent again after any error: those that are stored already answer `created: false`.
        """
        submitting = Submitting(self._door, patience_s, on_wait)
        return Submitting.all.steps(submitting, jobs, threads=threads)

    @streaming
    def submit_stream(
        self,
        jobs: Many,
        *,
        threads: int = 1,
        patience_s: float = PATIENCE_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> Emits[Submitted]:
        """`submit_many` for more than fits into memory: iterate over the answers, in order, and it goes on.

        No more is taken from `jobs` than is on its way. What was refused has an `error` in its answer.
        """
        yield Submitting(self._door, patience_s, on_wait).fan(jobs, threads)

    @operation
    def get(self, job_id: str) -> Operation[Job]:
        """The whole record, with its result when it is done."""
        return self._read(job_path(job_id))

    @operation
    def wait(
        self, job_id: str, timeout_s: float | None = None, *, on_wait: Callable[[str], None] | None = None
    ) -> Operation[Job]:
        """The record once the job has ended, however it did. Raises NotEnded when that takes longer than `timeout_s`.

        A server that restarts meanwhile is waited for, as long as the client has patience. `on_wait` is told each
        reason for which the job does not run that differs from the last, unless it passes by itself.
        """
        deadline = _deadline(timeout_s)
        wondering = Wondering(self._explain_until(deadline), on_wait)
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            wait_s = min(POLL_S, left_s, wondering.pause_s)
            job: Job = yield from self._read(job_path(job_id), {"wait": f"{wait_s:.3f}"}, wait_s, left_s)
            if job["status"] in TERMINAL:
                return job
            if time.monotonic() >= deadline:
                why = (yield from wondering.why([job_id])) if job["status"] == "pending" else None
                raise NotEnded([job_id], 1, timeout_s or 0.0, why)
            yield from wondering.tell([job_id] if job["status"] == "pending" else [])

    def _explain_until(self, deadline: float) -> Callable[[str], Operation[Explanation]]:
        return lambda job_id: self._read(job_path(job_id, "explain"), left_s=max(deadline - time.monotonic(), 0.0))

    @streaming
    def as_completed(
        self,
        job_ids: Iterable[str],
        timeout_s: float | None = None,
        *,
        on_wait: Callable[[str], None] | None = None,
    ) -> Emits[Job]:
        """The records of these jobs as they end, each once, without payloads.

        One request waits for a thousand of them; where there are more they take turns. Raises JobNotFound for an id
        that the server does not know, NotEnded when they take longer than `timeout_s`. `on_wait` is told each reason,
        and whose it is, for which one does not run that differs from the last, unless it passes by itself.
        """
        deadline = _deadline(timeout_s)
        wondering = Wondering(self._explain_until(deadline), on_wait, named=True)
        waiting = dict.fromkeys(job_ids)
        count = len(waiting)
        while waiting:
            some = list(itertools.islice(waiting, ASK_ABOUT))
            left_s = max(deadline - time.monotonic(), 0.0)
            wait_s = min(POLL_S if len(some) == len(waiting) else TURN_S, left_s, wondering.left_s)
            body = {"job_ids": some, "wait": round(wait_s, 3)}
            request = Request("POST", "/jobs/wait", body=body, timeout_s=TIMEOUT_S + wait_s, repeatable=True)
            answer = yield from self._ask(request, left_s)
            if answer["unknown"]:
                raise JobNotFound(answer["unknown"][0])
            for job in answer["jobs"]:
                del waiting[job["job_id"]]
                yield Emit(job)
            if waiting and not answer["jobs"] and time.monotonic() >= deadline:
                why = yield from wondering.why(list(waiting))
                raise NotEnded(list(waiting), count, timeout_s or 0.0, why)
            if waiting and not wondering.left_s:
                yield from wondering.tell(list(itertools.islice(waiting, ASK_ABOUT)))
            if not answer["more"] and len(waiting) > ASK_ABOUT:
                for job_id in some:  # to the end of the line
                    if job_id in waiting:
                        waiting[job_id] = waiting.pop(job_id)

    @streaming
    def jobs(
        self,
        *,
        status: str | None = None,
        agent: str | None = None,
        pool_id: str | None = None,
        type: str | None = None,
        workflow_id: str | None = None,
        tag: str | None = None,
    ) -> Emits[Job]:
        """All that match, newest first, without payloads; pages are asked for as you go on."""
        filters = {"status": status, "agent": agent, "pool_id": pool_id, "type": type}
        return self._pages("/jobs", "jobs", filters | {"workflow_id": workflow_id, "tag": tag})

    @operation
    def cancel(self, job_id: str) -> Operation[Cancelled]:
        """At once when it waits; when it runs, its worker is asked to stop it. No result of it counts any more."""
        return self._post(job_path(job_id, "cancel"), repeatable=True)

    @operation
    def retry(self, job_id: str) -> Operation[Retried]:
        """Start a failed, cancelled or dead-lettered job over. Not repeated when its answer is lost."""
        return self._post(job_path(job_id, "retry"), repeatable=False)

    @operation
    def set_priority(self, job_id: str, priority: int | str) -> Operation[Prioritized]:
        """`LOW`, `NORMAL`, `HIGH` or -100…100, while it waits."""
        return self._post(job_path(job_id, "priority"), {"priority": priority}, repeatable=True)

    @operation
    def explain(self, job_id: str) -> Operation[Explanation]:
        """Why it does not run, what that rests on, and when it may."""
        return self._read(job_path(job_id, "explain"))

    @operation
    def events(self, job_id: str, after: int = 0) -> Operation[Sequence[Event]]:
        """What happened to it since the event `after`, oldest first; a thousand at most."""
        found = yield from self._read(job_path(job_id, "events"), {"after": after})
        events: Sequence[Event] = found["events"]
        return events

    @operation
    def stats(self) -> Operation[Stats]:
        """How many jobs there are, by status, pool and agent."""
        return self._read("/jobs/stats")

    @operation
    def leases(self) -> Operation[Sequence[Lease]]:
        """Who holds GPU memory, oldest first: all of them."""
        found: list[Lease] = []
        cursor = None
        while True:
            page = yield from self._read("/leases", {"cursor": cursor})
            found += page["leases"]
            cursor = page.get("next_cursor")  # a server of an older version has no pages
            if cursor is None:
                return found


class PoolsOf(Polite[Door]):
    @operation
    def create(self, /, pool_id: str | None = None, **fields: Any) -> Operation[Pool]:
        """Make a pool, or begin one anew; again is fine. Fields are those of `POST /workers/pool`."""
        body = {"pool_id": pool_id or f"pool-{secrets.token_hex(6)}"} | fields
        return self._post("/workers/pool", body, repeatable=True)

    @operation
    def show(self, pool_id: str) -> Operation[Pool]:
        return self._read(pool_path(pool_id))

    @streaming
    def list(self) -> Emits[Pool]:
        return self._pages("/workers/pool", "pools", NOTHING)

    @operation
    def change(self, /, pool_id: str, **fields: Any) -> Operation[Pool]:
        """Other limits, or another model, which new workers load before the old ones leave."""
        return self._ask(Request("PATCH", pool_path(pool_id), body=fields, repeatable=True))

    @operation
    def scale(self, pool_id: str, workers: int) -> Operation[Pool]:
        return PoolsOf.change.steps(self, pool_id, desired_workers=workers)

    @operation
    def drain(self, pool_id: str, timeout_s: float | None = None) -> Operation[PoolState]:
        """No more jobs; those that run have `timeout_s` to end, then they are handed back."""
        body = _given({"pool_id": pool_id, "timeout_seconds": timeout_s})
        return self._post("/control/drain_pool", body, repeatable=True)

    @operation
    def evict(self, pool_id: str) -> Operation[PoolState]:
        """The same, now."""
        return self._post("/control/evict_pool", {"pool_id": pool_id}, repeatable=True)

    @operation
    def delete(self, pool_id: str) -> Operation[Deleted]:
        """Forget one that is stopped or evicted. Not repeated when its answer is lost."""
        return self._ask(Request("DELETE", pool_path(pool_id)))


class DeadLettersOf(Polite[Door]):
    """Filters are `type`, `agent`, `pool_id`, `reason`, and `job_ids` for those that change something.

    What changes many is not repeated when its answer is lost: it would take others.
    """

    @streaming
    def list(
        self,
        *,
        type: str | None = None,
        agent: str | None = None,
        pool_id: str | None = None,
        reason: str | None = None,
    ) -> Emits[DeadLetter]:
        """Latest first."""
        filters = {"type": type, "agent": agent, "pool_id": pool_id, "reason": reason}
        return self._pages("/dlq", "dead_letters", filters)

    @operation
    def redrive(
        self, /, *, dry_run: bool = False, max: int = 1000, rate: float | None = None, **filters: Any
    ) -> Operation[Redriven]:
        """Start them over, oldest first; with `rate` so many become due a second. No filter means all of them."""
        paced = {} if rate is None else {"rate": rate}
        body = {"filter": _given(filters), "dry_run": dry_run, "max": max} | paced
        return self._post("/dlq/redrive", body, repeatable=dry_run, wait_s=BULK_S)

    @operation
    def purge(self, /, *, dry_run: bool = False, max: int = 1000, **filters: Any) -> Operation[Purged]:
        """Forget them and their jobs for good. No filter means all of them."""
        body = {"filter": _given(filters), "dry_run": dry_run, "max": max}
        return self._post("/dlq/purge", body, repeatable=dry_run, wait_s=BULK_S)


class WorkflowsOf(Polite[Door]):
    @operation
    def create(
        self, /, tasks: Sequence[Mapping[str, Any]], workflow_id: str | None = None, **fields: Any
    ) -> Operation[Workflow]:
        """Tasks are jobs with a `name` and perhaps `depends_on`. The same id and content again is the same one."""
        body = {"workflow_id": workflow_id or new_workflow_id(), "tasks": [dict(task) for task in tasks]} | fields
        return self._post("/workflows", body, repeatable=True)

    @operation
    def get(self, workflow_id: str) -> Operation[Workflow]:
        """With its progress and its first tasks."""
        return self._read(workflow_path(workflow_id))

    @streaming
    def list(self, *, status: str | None = None, agent: str | None = None) -> Emits[Workflow]:
        """Newest first."""
        return self._pages("/workflows", "workflows", {"status": status, "agent": agent})

    @operation
    def wait(self, workflow_id: str, timeout_s: float | None = None) -> Operation[Workflow]:
        """The workflow once it has ended, however it did. Raises NotEnded when that takes longer than `timeout_s`."""
        deadline, pause_s = _deadline(timeout_s), LOOK_S
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            # One task is enough to look at it; there may be thousands.
            workflow: Workflow = yield from self._read(workflow_path(workflow_id), {"limit": 1}, left_s=left_s)
            if workflow["status"] != "running":
                whole: Workflow = yield from self._read(workflow_path(workflow_id), left_s=left_s)
                return whole
            if time.monotonic() >= deadline:
                raise NotEnded([workflow_id], 1, timeout_s or 0.0)
            yield Pause(min(pause_s, deadline - time.monotonic()))
            pause_s = min(pause_s * 1.5, LOOK_MAX_S)

    @operation
    def add_tasks(self, workflow_id: str, tasks: Sequence[Mapping[str, Any]]) -> Operation[Added]:
        """More tasks while it runs; their names make it safe to repeat."""
        body = {"tasks": [dict(task) for task in tasks]}
        return self._post(workflow_path(workflow_id, "tasks"), body, repeatable=True)

    @operation
    def cancel(self, workflow_id: str) -> Operation[Workflow]:
        """Tasks that wait end now, those that run are asked to stop."""
        return self._post(workflow_path(workflow_id, "cancel"), repeatable=True)

    @operation
    def retry_failed(self, workflow_id: str) -> Operation[Workflow]:
        """Start what ended badly over. Not repeated when its answer is lost."""
        return self._post(workflow_path(workflow_id, "retry_failed"), repeatable=False)

    @operation
    def rerun(self, workflow_id: str, task: str) -> Operation[Workflow]:
        """Run a task again, with all that follow from it. Not repeated when its answer is lost."""
        return self._post(workflow_path(workflow_id, "rerun"), {"task": task}, repeatable=False)


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
