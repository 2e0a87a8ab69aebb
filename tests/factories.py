"""Jobs, workers and GPUs for tests: what a scenario needs, in one line each."""

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, NullPool, create_engine, event, insert, select, text, update

from orchestrator.actors import acting
from orchestrator.errors import WorkerLost
from orchestrator.gpu import Gpu, GpuProcess
from orchestrator.jobs import ErrorKind, NewJob, RetryPolicy, Status
from orchestrator.leases import ResidentSlot, Terms, token_hash
from orchestrator.placement import Policy
from orchestrator.policies import Book
from orchestrator.store import audit, inventory, nodes, renewals, schema
from orchestrator.store.caps import Seats
from orchestrator.store.claim import Claim, NotClaimed, claim_jobs
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_now, utc_shift
from orchestrator.store.gpus import Gate
from orchestrator.store.inventory import Findings
from orchestrator.store.moves import Claimant
from orchestrator.store.settle import (
    End,
    NotAllOwned,
    Outcome,
    Settled,
    Start,
    all_done,
    finish_all,
    record,
    take_from_dead,
)
from orchestrator.store.submit import Verdict, submit_jobs

T = TypeVar("T")

POLICY = RetryPolicy(base_s=1.0, cap_s=60.0, max_crashes=2)
GATE_PCT = 90
STALE_S = 30.0


def new_job(**fields: Any) -> NewJob:
    return NewJob.prepare({"type": "echo", "payload": {}} | fields, max_bytes=1 << 20, max_depth=64)


def submit(db: Database, count: int = 1, **fields: Any) -> list[str]:
    """Submit `count` equal jobs; their ids, in order."""
    batch = [new_job(**fields) for _ in range(count)]
    assert set(submit_jobs(db, batch, POLICY)) == {Verdict.CREATED}
    return [job.job_id for job in batch]


def gpu(index: int = 0, total_mb: int = 24576, uuid: str | None = None, **fields: Any) -> Gpu:
    """A sample. `foreign_mb` is memory in the hands of a process of nobody we know."""
    if foreign_mb := fields.pop("foreign_mb", 0):
        fields["used_mb"] = max(fields.get("used_mb", 0), foreign_mb)
        fields["processes"] = (GpuProcess(0, foreign_mb),)
    base = Gpu(uuid or f"GPU-{index}", index, "simulated", total_mb, used_mb=0)
    return replace(base, **fields)


@dataclass
class Hand:
    """A registered worker, moved by the test instead of by a process."""

    db: Database
    worker: nodes.Worker
    gpus: list[Gpu] = field(default_factory=list)
    terms: Terms = field(default_factory=lambda: Terms(STALE_S, Policy.BEST_FIT))
    #: The policies that it knows of, and the lanes that its transactions let somebody go in.
    book: Book = field(default_factory=Book)
    freed: set[str] = field(default_factory=set)

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    @property
    def by(self) -> Claimant:
        return Claimant(self.worker_id, self.worker.node_id, self.worker.pool_id, 60.0, self.terms)

    def beat(self, *, running: Collection[str] = (), patience_s: float = 10.0, **fields: Any) -> Findings:
        """A heartbeat and a sample; `running` are the slots that live."""
        beat = nodes.Beat(**({"busy": 0, "done": 0, "failed": 0, "draining": False} | fields))

        def work(conn: Any) -> Findings:
            if nodes.heartbeats(conn, self.worker.node_id, {self.worker_id: beat}, {}, recent_s=60.0).lost:
                raise WorkerLost(self.worker_id)
            nodes.note_progress(conn, {self.worker_id: beat})
            gate = Gate(GATE_PCT)
            return inventory.take_stock(
                conn,
                self.worker.node_id,
                [self.worker_id],
                self.gpus,
                gate,
                running,
                patience_s,
                resident=beat.resident,
            )

        return self.db.write(work)

    def sees(self, *gpus: Gpu, **fields: Any) -> Findings:
        """The GPUs look like that from now on, and the database hears of it."""
        self.gpus = list(gpus)
        return self.beat(**fields)

    def offer(
        self,
        *job_ids: str,
        memory_mb: int | None = 0,
        held: Collection[str] = (),
        warm: Sequence[ResidentSlot] = (),
        blank: int | None = None,
        batch: int = 0,
    ) -> dict[str, Claim | NotClaimed]:
        """Try to claim; `memory_mb` is the handler's need, None for a worker without a handler; `batch` its size."""

        def work(conn: Any) -> tuple[dict[str, Claim | NotClaimed], set[str]]:
            seats = Seats(conn, self.book)
            seats.expect(job_ids)
            answers = claim_jobs(
                conn, self.by, job_ids, lambda _type: memory_mb, held, warm, blank, lambda _type: batch, seats=seats
            )
            seats.close()
            return answers, seats.freed

        answers, freed = self.db.write(work)
        self.freed |= freed
        return answers

    def claim(self, *job_ids: str, memory_mb: int = 0) -> list[Any]:
        answers = self.offer(*job_ids, memory_mb=memory_mb)
        claims = [answers[job_id] for job_id in job_ids]
        assert all(isinstance(claim, Claim) for claim in claims), claims
        return claims

    def record(
        self, starts: Collection[Start] = (), ends: Collection[End] = (), policy: RetryPolicy = POLICY
    ) -> list[Settled]:
        """As a worker does: the short way when all is done, the long one when that finds a stranger."""
        if not starts and all_done([*ends]):
            try:
                return self.db.write(lambda conn: finish_all(conn, self.by, [*ends]))
            except NotAllOwned:
                pass
        return self.db.write(lambda conn: record(conn, self.by, [*starts], [*ends], policy))

    def start(self, *claims: Claim) -> None:
        self.record(starts=[Start(claim.job_id, claim.attempt) for claim in claims])

    def finish(self, *claims: Claim) -> list[Settled]:
        return self.record(ends=[done(claim) for claim in claims])

    def fail(self, claim: Claim, kind: ErrorKind = ErrorKind.TRANSIENT, **fields: Any) -> Settled:
        return self.record(ends=[failed(claim, kind, **fields)])[0]

    def hand_back(self, claim: Claim) -> Settled:
        return self.record(ends=[End(claim.job_id, claim.attempt, Outcome.HANDED_BACK, error="leaving")])[0]

    def go_silent(self, seconds: float = 3600.0) -> None:
        """As if the last heartbeat had come that long ago."""
        silence = update(schema.workers).where(schema.workers.c.worker_id == self.worker_id)
        self.db.write(lambda conn: conn.execute(silence.values(last_heartbeat=utc_shift(-seconds))))

    def lose(self, limit: int = 10, policy: RetryPolicy = POLICY) -> list[Settled]:
        """The leader gives this worker up, and takes so many of its jobs at most."""
        lost = update(schema.workers).where(schema.workers.c.worker_id == self.worker_id).values(status=schema.LOST)
        self.db.write(lambda conn: conn.execute(lost))
        return self.db.write(lambda conn: take_from_dead(conn, self.by, policy, limit))


def hire(
    db: Database, *gpus: Gpu, pool: str = "default", node: str = "node-1", slots: int = 4, type: str = "echo"
) -> Hand:
    """Register a worker and let it send its first heartbeat."""
    worker_id = f"{node}:1:{secrets.token_hex(4)}"
    worker = nodes.Worker(worker_id, node, pool, node, 1, slots, (type,))
    db.write(lambda conn: nodes.register(conn, worker, nodes.Host("sim")))
    hand = Hand(db, worker, list(gpus))
    hand.beat()
    return hand


def done(claim: Claim, result: str = "{}") -> End:
    key = claim.lease.key if claim.lease else None
    of_claim: Any = {"lease_key": key, "caps": claim.caps, "workflow_id": claim.workflow_id}
    return End(claim.job_id, claim.attempt, Outcome.DONE, run_seconds=0.5, result=result, **of_claim)


def failed(claim: Claim, kind: ErrorKind = ErrorKind.TRANSIENT, **fields: Any) -> End:
    fields = {"error": "it broke"} | fields
    return End(claim.job_id, claim.attempt, Outcome.FAILED, run_seconds=0.5, error_kind=kind, **fields)


# --- looking ---


def row(db: Database, job_id: str) -> Any:
    return db.read(lambda conn: conn.execute(select(schema.jobs).where(schema.jobs.c.job_id == job_id)).one())


def status(db: Database, job_id: str) -> str:
    found: str = row(db, job_id).status
    return found


def history(db: Database, job_id: str) -> list[str]:
    """The event types of a job's audit rows, oldest first."""
    return [entry["event_type"] for entry in db.read(lambda conn: audit.of_job(conn, job_id))]


def rows(db: Database, table: Any) -> list[Any]:
    return list(db.read(lambda conn: conn.execute(select(table)).all()))


def set_job(db: Database, job_id: str, **values: Any) -> None:
    """Write columns of a job behind the back of all guards."""
    if "status" in values:
        values = {"queued": "ready" if values["status"] == Status.PENDING else None} | values
    change = update(schema.jobs).where(schema.jobs.c.job_id == job_id).values(**values)
    db.write(lambda conn: conn.execute(change))


def spoil_job(db: Database, job_id: str, **values: Any) -> None:
    """Write what no CHECK would let through, as whoever switches them off can."""
    off, on = ("SET check_constraint_checks = 0", "SET check_constraint_checks = 1")
    if is_sqlite(db):
        off, on = ("PRAGMA ignore_check_constraints = ON", "PRAGMA ignore_check_constraints = OFF")

    def work(conn: Connection) -> None:
        conn.execute(text(off))
        conn.execute(update(schema.jobs).where(schema.jobs.c.job_id == job_id).values(**values))
        conn.execute(text(on))

    db.write(work)


def now(db: Database) -> datetime:
    found: datetime = db.read(lambda conn: conn.execute(select(utc_now())).scalar_one())
    return found


def meeting(count: int, call: Callable[..., T]) -> Callable[..., T]:
    """The first `count` callers of it get their answers together: each has seen what was there before the others."""
    barrier, left = threading.Barrier(count), iter(range(count))

    def met(*args: Any, **kwargs: Any) -> T:
        answer = call(*args, **kwargs)
        if next(left, None) is not None:
            barrier.wait(30)
        return answer

    return met


def is_sqlite(db: Database) -> bool:
    return db.engine.dialect.name == "sqlite"


def many_jobs(db: Database, count: int, **columns: Any) -> None:
    """Thousands of rows at once, for plans and windows; a column may be a function of the row's number."""
    plain: dict[str, Any] = {
        "type": "echo",
        "payload": "{}",
        "payload_hash": "0" * 64,
        "agent": "anonymous",
        "lane": "default",
        "max_attempts": 5,
        "rank": lambda i: i,
        "job_id": lambda i: f"many-{i:06}",
    } | columns
    batch = [{key: v(i) if callable(v) else v for key, v in plain.items()} for i in range(count)]
    db.write(lambda conn: conn.execute(insert(schema.jobs), batch))


def rows_read(conn: Connection) -> int:
    """Rows that this connection read so far, and entries of indexes, as MariaDB counts them."""
    read = conn.execute(text("SHOW SESSION STATUS LIKE 'Handler_read%'")).all()
    return sum(int(count) for _name, count in read)


# --- holding ---


@contextmanager
def holding(db: Database, table: Any, *conditions: Any, read: bool = False) -> Iterator[None]:
    """Hold rows, as an operator's shell does. It is no session of ours: those the server ends when they idle.

    Only rows: as shells are by default it would hold what lies between them too, unless the conditions name keys.
    """
    engine = create_engine(db.settings.database_url, poolclass=NullPool, isolation_level="READ COMMITTED")
    with engine.connect() as operator:
        held = operator.execute(select(table).where(*conditions).with_for_update(read=read))
        assert held.all(), "there is nothing to hold"
        yield
        operator.rollback()


def holding_job(db: Database, *job_ids: str) -> AbstractContextManager[None]:
    return holding(db, schema.jobs, schema.jobs.c.job_id.in_(job_ids))


# --- counting ---


@dataclass
class Traffic:
    statements: list[str] = field(default_factory=list)
    commits: int = 0


@contextmanager
def traffic(db: Database) -> Iterator[Traffic]:
    """Statements and commits that reach the database through transactions."""
    seen = Traffic()

    def on_statement(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.statements.append(statement)

    def on_commit(_conn: Any) -> None:
        seen.commits += 1

    event.listen(db.engine, "before_cursor_execute", on_statement)
    event.listen(db.engine, "commit", on_commit)
    try:
        yield seen
    finally:
        event.remove(db.engine, "before_cursor_execute", on_statement)
        event.remove(db.engine, "commit", on_commit)


def heartbeat(db: Database, token: str) -> datetime:
    """Of a client's lease: until when it lives now. Raises why it does not."""
    (answer,) = db.write(lambda conn: renewals.renew(conn, [token_hash(token)]))
    if isinstance(answer, Exception):
        raise answer
    return answer


def active_leases(db: Database) -> list[Any]:
    query = select(schema.leases).where(schema.leases.c.state == "active")
    return list(db.read(lambda conn: conn.execute(query).all()))


def write_as(actor: str, db: Database, work: Callable[[Connection], T]) -> T:
    """In a transaction, by somebody."""
    with acting(actor):
        return db.write(work)
