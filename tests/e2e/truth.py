"""What the metrics must say, from the tables themselves: rows of jobs and of the audit trail, one by one.

Nothing here is read the way the orchestrator reads it: a total is counted again from what happened.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from sqlalchemy import Row, text

from orchestrator import __version__
from orchestrator.store.database import Database

#: Label values, in the order of the labels' names → value.
Reading = dict[tuple[str, ...], float]
#: The same, but every value that a histogram must have seen.
Values = dict[tuple[str, ...], list[float]]

ENDS = {
    "job.done": "done",
    "job.skipped": "skipped",
    "job.failed": "failed",
    "job.expired": "failed",
    "job.dead_letter": "dead_letter",
    "job.cancelled": "cancelled",
}
STREAM = "stream:orchestrator:inference_jobs"
#: What the leader writes about a job that it took from a lost worker.
LOST = "stopped sending heartbeats"


@dataclass(frozen=True)
class Event:
    job: Row[Any]
    name: str
    attempt: int
    at: datetime
    details: dict[str, Any]
    worker: str | None
    #: What happened to the job before, the last first.
    before: "tuple[Event, ...]"

    @property
    def anew(self) -> "Event | None":
        """When it was last started over, if that was before."""
        return next((event for event in self.before if event.name == "job.redriven"), None)


class Truth:
    """All that happened until now."""

    def __init__(self, db: Database) -> None:
        self._db = db
        jobs = {row.job_id: row for row in self.rows("SELECT * FROM orchestrator_jobs")}
        trail = self.rows("SELECT * FROM orchestrator_audit WHERE job_id IS NOT NULL ORDER BY job_id, id")
        self.jobs = list(jobs.values())
        self.events = [
            event
            for job_id, rows in groupby(trail, lambda row: str(row.job_id))
            for event in _events(jobs[job_id], list(rows))
        ]
        self._run_seconds = {
            (row.job_id, row.attempt): row.run_seconds
            for row in self.rows("SELECT job_id, attempt, run_seconds FROM orchestrator_results")
        }
        self._lost = {row.worker_id for row in self.rows("SELECT worker_id FROM workers WHERE status = 'lost'")}

    def rows(self, statement: str) -> list[Row[Any]]:
        return self._db.read(lambda conn: list(conn.execute(text(statement)).all()))

    def one(self, statement: str) -> Any:
        return self.rows(statement)[0][0]

    # ── totals ──────────────────────────────────────────────────────────────────────────────────────────────────

    def jobs_submitted_total(self) -> Reading:
        return _counted((row.type,) for row in self.jobs)

    def jobs_finished_total(self) -> Reading:
        return _counted((ENDS[event.name], event.job.type) for event in self.events if event.name in ENDS)

    def retries_total(self) -> Reading:
        again = [event.details["kind"] for event in self.events if event.name == "job.retry"]
        anew = ["redrive" for event in self.events if event.name == "job.redriven"]
        return _counted((reason,) for reason in again + anew)

    def reclaims_total(self) -> Reading:
        ways = {"job.retry": "retried", "job.dead_letter": "buried", "job.cancelled": "cancelled"}
        return _counted((ways[event.name],) for event in self.events if event.name in ways and self._reclaimed(event))

    def _reclaimed(self, event: Event) -> bool:
        # Of a cancelled job nobody writes down why its attempt ended; its worker says it.
        return LOST in event.details.get("error", "") or (event.name == "job.cancelled" and event.worker in self._lost)

    # ── times ───────────────────────────────────────────────────────────────────────────────────────────────────

    def job_latency_seconds(self) -> Values:
        """From a job's submit, or since it was started over, to its end."""
        ends = [event for event in self.events if event.name in ENDS]
        return _by_type((event, _seconds(_began(event), event.at)) for event in ends)

    def job_wait_seconds(self) -> Values:
        """From then to its first claim; here nothing that was claimed had to wait for a moment of its own."""
        claims = [event for event in self.events if event.name == "job.claimed"]
        return _by_type((event, _wait(event)) for event in claims if event.attempt == 1 or _first_anew(event))

    def job_run_seconds(self) -> Values:
        """What the worker measured, or from the start of an attempt until its process was seen to be gone."""
        ended = [event for event in self.events if event.name in ENDS or event.name == "job.retry"]
        return _by_type((event, seconds) for event in ended if (seconds := self._ran(event)))

    def _ran(self, event: Event) -> float | None:
        told = self._run_seconds.get((event.job.job_id, event.attempt)) or event.details.get("run_seconds")
        if told or event.name == "job.cancelled" or self._reclaimed(event):
            return told
        return _seconds(event.job.started_at or event.job.claimed_at, event.at)

    # ── the cluster now ─────────────────────────────────────────────────────────────────────────────────────────

    def job_queue_depth(self) -> Reading:
        return self._by_stream("queued IN ('ready', 'announced') OR status IN ('claimed', 'running')")

    def jobs_delayed(self) -> Reading:
        return self._by_stream("queued = 'delayed'")

    def jobs_blocked(self) -> Reading:
        return self._by_stream("queued = 'blocked'")

    def _by_stream(self, condition: str) -> Reading:
        found = self.rows(f"SELECT lane, SUM({condition}) AS jobs FROM orchestrator_jobs GROUP BY lane")
        return {(_stream(row.lane),): float(row.jobs or 0) for row in found}

    def jobs_in_flight(self) -> Reading:
        return self._counts(
            "SELECT lane, SUM(status IN ('claimed', 'running')) AS jobs FROM orchestrator_jobs GROUP BY lane"
        )

    def oldest_pending_age_seconds(self) -> Reading:
        age = "MAX(IF(queued IN ('ready', 'announced'), TIMESTAMPDIFF(MICROSECOND, created_at, UTC_TIMESTAMP(6)), 0))"
        found = self.rows(f"SELECT lane, {age} / 1e6 AS age FROM orchestrator_jobs GROUP BY lane")
        return {(_stream(row.lane),): float(row.age) for row in found}

    def dlq_depth(self) -> Reading:
        return {(): self.one("SELECT COUNT(*) FROM dead_letters")}

    def leader_epoch(self) -> Reading:
        return {(): self.one("SELECT epoch FROM leadership")}

    def leases_active(self) -> Reading:
        return {(): self.one("SELECT COUNT(*) FROM orchestrator_leases WHERE state = 'active' AND mode = 'gpu'")}

    def leases_free(self) -> Reading:
        open_ = "health = 'ok' AND quarantined_at IS NULL AND gate_closed_at IS NULL"
        return {(): self.one(f"SELECT COUNT(*) FROM gpus WHERE {open_} AND usable_mb > leased_mb + foreign_mb")}

    def gpu_mem_used_pct(self) -> Reading:
        return self._by_gpu("1e2 * used_mb / total_mb")

    def gpu_mem_leased_mb(self) -> Reading:
        return self._by_gpu("leased_mb")

    def gpu_mem_foreign_mb(self) -> Reading:
        return self._by_gpu("foreign_mb")

    def gpu_quarantined(self) -> Reading:
        return self._by_gpu("quarantined_at IS NOT NULL")

    def _by_gpu(self, what: str) -> Reading:
        return self._counts(f"SELECT gpu_index, node_id, {what} FROM gpus")

    def worker_pools_total(self) -> Reading:
        return self._counts("SELECT status, COUNT(*) FROM worker_pools GROUP BY status")

    def worker_pool_workers(self) -> Reading:
        alive = "status IN ('active', 'draining')"
        return self._counts(f"SELECT pool_id, COUNT(*) FROM workers WHERE {alive} GROUP BY pool_id")

    def _counts(self, statement: str) -> Reading:
        found = [tuple(row) for row in self.rows(statement)]
        return {tuple(map(str, row[:-1])): float(row[-1]) for row in found}

    # ── what instances did ──────────────────────────────────────────────────────────────────────────────────────

    def leader(self) -> Reading:
        return {(self.one("SELECT holder FROM leadership"),): 1.0}

    def build_info(self) -> Reading:
        return {(__version__,): 1.0}

    def batch_size(self) -> tuple[int, int]:
        """Calls and jobs of the type `gather`, as workers told them."""
        told = [
            json.loads(row[0]) for row in self.rows("SELECT batch_sizes FROM workers WHERE batch_sizes IS NOT NULL")
        ]
        sizes = [by_type["gather"] for by_type in told if "gather" in by_type]
        return sum(sum(size["calls"]) for size in sizes), sum(size["jobs"] for size in sizes)

    def granted(self) -> dict[str, int]:
        """Leases of clients by mode: those of jobs and of models were not asked for over HTTP."""
        theirs = "job_id IS NULL AND NOT resident"
        found = self.rows(f"SELECT mode, COUNT(*) AS held FROM orchestrator_leases WHERE {theirs} GROUP BY mode")
        return {f"granted {row.mode}": row.held for row in found}

    def lost_workers(self) -> int:
        return len(self._lost)

    def silence(self) -> float:
        """From the last heartbeat of the one worker that was lost until the last of its jobs was given away."""
        (heard,) = self.rows("SELECT last_heartbeat FROM workers WHERE status = 'lost'")
        return _seconds(heard[0], max(event.at for event in self.events if self._reclaimed(event)))


def _events(job: Row[Any], rows: list[Row[Any]]) -> Iterator[Event]:
    before: tuple[Event, ...] = ()
    for row in rows:
        details = json.loads(row.details or "{}")
        event = Event(job, row.event_type, row.attempt or 0, row.ts, details, row.worker_id, before)
        before = (event, *before)
        yield event


def _began(event: Event) -> datetime:
    return event.anew.at if event.anew else event.job.created_at


def _wait(event: Event) -> float:
    due = [_began(event)]
    if event.anew and event.job.ready_at is not None and event.job.ready_at <= event.at:
        due.append(event.job.ready_at)
    return _seconds(max(due), event.at)


def _first_anew(event: Event) -> bool:
    return bool(event.before) and event.before[0].name == "job.redriven"


def _seconds(start: datetime, end: datetime) -> float:
    return max((end - start).total_seconds(), 0.0)


def _stream(lane: str) -> str:
    return STREAM if lane == "default" else f"{STREAM}:{lane}"


def _counted(keys: Iterator[tuple[str, ...]]) -> Reading:
    return {key: float(times) for key, times in Counter(keys).items()}


def _by_type(values: Iterator[tuple[Event, float]]) -> Values:
    found: Values = defaultdict(list)
    for event, seconds in values:
        found[(event.job.type,)].append(seconds)
    return dict(found)
