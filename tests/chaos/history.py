"""What happened in a run: what was accepted, what the database says, what the handlers wrote, which faults came."""

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql
from pymysql.cursors import DictCursor

from tests.chaos import ledger
from tests.chaos.kinds import Submitted
from tests.chaos.ledger import Line
from tests.servers import MariaDB, Redis

#: Seconds around a job's life in which faults are shown with its history.
AROUND_S = 2.0


@dataclass(frozen=True)
class Happened:
    """A fault, or the end of a process that nobody ended."""

    mono: float
    text: str


class Recorder:
    """Collects during a run, from all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.began = time.monotonic()
        self.submitted: dict[str, Submitted] = {}
        #: Jobs that were asked to be cancelled, and those for which the answer was yes.
        self.cancel_asked: set[str] = set()
        self.cancel_granted: set[str] = set()
        self.happened: list[Happened] = []
        #: Violations that were seen while the run went on: invariant, job, text.
        self.incidents: list[tuple[str, str | None, str]] = []

    def accept(self, job: Submitted) -> bool:
        """Whether this is news."""
        with self._lock:
            new = job.job_id not in self.submitted
            self.submitted.setdefault(job.job_id, job)
            return new

    def happen(self, text: str) -> None:
        with self._lock:
            self.happened.append(Happened(time.monotonic(), text))

    def incident(self, invariant: str, job_id: str | None, text: str) -> None:
        """Once, however often it is seen."""
        with self._lock:
            if (invariant, job_id, text) not in self.incidents:
                self.incidents.append((invariant, job_id, text))


@dataclass(frozen=True)
class History:
    submitted: dict[str, Submitted]
    jobs: dict[str, dict[str, Any]]
    audit: list[dict[str, Any]]
    results: dict[str, dict[str, Any]]
    lines: list[Line]
    gpus: list[dict[str, Any]] = field(default_factory=list)
    leases: list[dict[str, Any]] = field(default_factory=list)
    caps: list[dict[str, Any]] = field(default_factory=list)
    #: Name → entries, and those of them that are pending.
    streams: dict[str, tuple[int, int]] = field(default_factory=dict)
    letters: list[dict[str, str]] = field(default_factory=list)
    #: None when the database has no such table.
    dead_letters: list[dict[str, Any]] | None = None
    cancel_asked: set[str] = field(default_factory=set)
    cancel_granted: set[str] = field(default_factory=set)
    incidents: list[tuple[str, str | None, str]] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    max_crashes: int = 2
    #: What to add to the monotonic clock to get the database's.
    wall_offset: float = 0.0

    def wall(self, mono: float) -> float:
        return mono + self.wall_offset

    def of(self, job_id: str) -> str:
        """Everything that is known of one job, to be read by a person."""
        lines = [line for line in self.lines if line.job_id == job_id]
        told = [f"submitted {self.submitted.get(job_id)}", f"row       {_shown(self.jobs.get(job_id))}"]
        told += ["was cancelled"] * (job_id in self.cancel_granted)
        told += [f"result    {_shown(self.results.get(job_id))}"]
        told += [f"audit     {_shown(event)}" for event in self.audit if event["job_id"] == job_id]
        told += [f"ledger    {self.wall(line.mono):.3f} {line}" for line in lines]
        if lines:
            first, last = lines[0].mono - AROUND_S, lines[-1].mono + AROUND_S
            near = [item for item in self.happened if first <= item.mono <= last]
            told += [f"fault     {self.wall(item.mono):.3f} {item.text}" for item in near]
        return "\n".join(f"    {line}" for line in told)


def collect(
    recorder: Recorder, mariadb: MariaDB, redis: Redis, ledger_file: Path, *, max_crashes: int, prefix: str
) -> History:
    """Read everything, past every proxy."""
    with mariadb.connect() as connection:
        connection.select_db("orchestrator")
        cursor = connection.cursor(DictCursor)
        return History(
            submitted=dict(recorder.submitted),
            jobs=_by_id(cursor, "SELECT * FROM orchestrator_jobs"),
            audit=[row | {"details": _json(row["details"])} for row in _rows(cursor, "orchestrator_audit ORDER BY id")],
            results={
                row["job_id"]: row | {"result": _json(row["result"])} for row in _rows(cursor, "orchestrator_results")
            },
            lines=ledger.read(ledger_file),
            gpus=_rows(cursor, "gpus"),
            leases=_rows(cursor, "orchestrator_leases WHERE state = 'active'"),
            caps=_rows(cursor, "concurrency_caps"),
            streams=streams(redis, prefix),
            letters=_letters(redis, prefix),
            dead_letters=_dead_letters(cursor),
            cancel_asked=set(recorder.cancel_asked),
            cancel_granted=set(recorder.cancel_granted),
            incidents=list(recorder.incidents),
            happened=list(recorder.happened),
            max_crashes=max_crashes,
            wall_offset=time.time() - time.monotonic(),
        )


def streams(redis: Redis, prefix: str) -> dict[str, tuple[int, int]]:
    """Entries and pending entries of every lane."""
    with redis.client() as client:
        names = list(client.scan_iter(f"{prefix}inference_jobs*", _type="stream"))
        return {name: (client.xlen(name), sum(g["pending"] for g in client.xinfo_groups(name))) for name in names}


def _letters(redis: Redis, prefix: str) -> list[dict[str, str]]:
    with redis.client() as client:
        return [dict(fields) for _, fields in client.xrange(f"{prefix}dlq")]


def _dead_letters(cursor: Any) -> list[dict[str, Any]] | None:
    try:
        return _rows(cursor, "dead_letters")
    except pymysql.ProgrammingError:
        return None


def _rows(cursor: Any, source: str) -> list[dict[str, Any]]:
    cursor.execute(f"SELECT * FROM {source}")
    return list(cursor.fetchall())


def _by_id(cursor: Any, query: str) -> dict[str, dict[str, Any]]:
    cursor.execute(query)
    return {row["job_id"]: row for row in cursor.fetchall()}


def _json(text: str | None) -> dict[str, Any]:
    return dict(json.loads(text)) if text else {}


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return "none"
    skipped = {"payload", "payload_hash", "trace_context", "tags"}
    return " ".join(f"{key}={value}" for key, value in row.items() if value is not None and key not in skipped)
