"""One heartbeat for all workers of a process: what it costs, and that nobody's trouble is a neighbour's."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text, update

from orchestrator.errors import DatabaseUnavailable, WorkerLost
from orchestrator.gpu import Gpu
from orchestrator.gpu.backends import NoGpus
from orchestrator.gpu.watch import Watch
from orchestrator.store import schema, withdraw
from orchestrator.store.database import Database
from orchestrator.store.dialect import walking
from orchestrator.store.nodes import Beat
from tests.factories import Hand, active_leases, gpu, hire, holding, rows, submit, traffic
from worker.keepalive import Keepalive, Pulse
from worker.lifeline import _VOUCHED, Lifeline

LONG_AGO = 2020
#: Longer than any test takes: nobody waits for a worker's death here.
TIMEOUT_S = 60.0


class OneGpu(NoGpus):
    asked = 0

    def sample(self) -> list[Gpu]:
        self.asked += 1
        return [gpu()]


@dataclass
class Member:
    """A worker as the keepalive knows it, and what it was told."""

    hand: Hand
    beat: Beat = field(default_factory=lambda: Beat(0, 0, 0, draining=False))
    told: list[Any] = field(default_factory=list)
    breaks: bool = False

    def __post_init__(self) -> None:
        self.lifeline = Lifeline()
        self.pulse = Pulse(
            self.hand.worker_id,
            self.say,
            set,
            self.lifeline,
            lambda: self.told.append("lost"),
            lambda jobs: self.told.append([job_id for job_id, _ in jobs]),
            lambda _sample, _findings: None,
        )

    def say(self) -> Beat:
        if self.breaks:
            raise RuntimeError("cannot say how it is")
        return self.beat

    def row(self, db: Database) -> Any:
        (found,) = [row for row in rows(db, schema.workers) if row.worker_id == self.hand.worker_id]
        return found

    def heard(self, db: Database) -> bool:
        return bool(self.row(db).last_heartbeat.year > LONG_AGO)


@pytest.fixture
def backend() -> OneGpu:
    return OneGpu()


@pytest.fixture
def keepalive(db, settings, backend) -> Iterator[Keepalive]:
    watch = Watch(backend, 5.0)
    yield Keepalive(db, "node-1", watch, settings(worker_timeout_s=TIMEOUT_S))
    watch.close()


@pytest.fixture
def crew(db, keepalive) -> list[Member]:
    return joined(db, keepalive, 3)


def joined(db, keepalive: Keepalive, count: int) -> list[Member]:
    """So many workers after their first heartbeat, and hours ago by now."""
    members = [Member(hire(db, pool=f"pool-{number}")) for number in range(count)]
    keepalive._pulses += [member.pulse for member in members]
    keepalive.beat()
    assert [member.pulse.first.result(0) for member in members] == [None] * count
    make_old(db)
    return members


def make_old(db) -> None:
    db.write(
        lambda conn: conn.execute(update(schema.workers).values(last_heartbeat=datetime(LONG_AGO, 1, 1, tzinfo=UTC)))
    )


@pytest.mark.parametrize("count", [1, 20])
def test_a_beat_of_many_idle_workers_costs_as_much_as_that_of_one(db, keepalive, backend, count):
    members = joined(db, keepalive, count)
    asked = backend.asked
    with traffic(db) as seen:
        keepalive.beat()
    assert len([one for one in seen.statements if not one.startswith("BEGIN")]) <= 9, seen.statements
    assert seen.commits == 2, "that they live, and the sample"
    assert backend.asked == asked + 1
    assert all(member.heard(db) for member in members)


def test_what_changed_is_said(db, keepalive, crew):
    crew[1].beat = Beat(2, 5, 1, draining=True, slots=7, ready=3, trouble="no memory", blocked=True, load_seconds=1.5)
    keepalive.beat()
    said = crew[1].row(db)
    assert (said.busy, said.jobs_done, said.jobs_failed, said.status) == (2, 5, 1, "draining")
    assert (said.slots, said.ready, said.trouble, said.blocked, said.load_seconds) == (7, 3, "no memory", True, 1.5)
    assert all(member.heard(db) for member in crew)


def test_what_was_not_committed_is_said_again(db, keepalive, crew, monkeypatch):
    crew[1].beat = Beat(0, 9, 0, draining=False)
    with monkeypatch.context() as patched:
        patched.setattr(db, "write", away)
        keepalive.beat()
    keepalive.beat()
    assert 9 in [row.jobs_done for row in rows(db, schema.workers)]


def test_what_was_committed_without_an_answer_is_said_again(db, keepalive, crew, lose_commits):
    """Nobody knows what stands in the row then, so that what was said before is no reason to be quiet."""
    before = crew[1].beat
    crew[1].beat = Beat(0, 0, 0, draining=False, ready=0, trouble="slot died")
    lose_commits(20)
    keepalive.beat()
    assert crew[1].row(db).trouble == "slot died"
    lose_commits(0)
    crew[1].beat = before
    keepalive.beat()
    assert crew[1].row(db).trouble is None


def away(_work: Any, _patience_s: float = 0.0) -> None:
    raise DatabaseUnavailable("nobody there")


@pytest.mark.parametrize("busy", [0, 1])
def test_only_who_was_declared_dead_is_told_so(db, keepalive, crew, busy):
    """Whether it has something to say or not."""
    first = crew[0].lifeline.until
    crew[1].beat = Beat(busy, 0, 0, draining=False)
    dead = schema.workers.c.worker_id == crew[1].hand.worker_id
    db.write(lambda conn: conn.execute(update(schema.workers).where(dead).values(status="lost")))
    keepalive.beat()
    keepalive.beat()
    assert [member.told for member in crew] == [[], ["lost"], []]
    assert [member.heard(db) for member in crew] == [True, False, True]
    assert crew[1].lifeline.until < crew[0].lifeline.until
    assert crew[0].lifeline.until > first


def test_who_was_heard_is_vouched_for_until_it_may_be_declared_dead_and_nobody_else(db, keepalive, crew):
    dead = schema.workers.c.worker_id == crew[1].hand.worker_id
    db.write(lambda conn: conn.execute(update(schema.workers).where(dead).values(status="lost")))
    for member in crew:
        member.lifeline.vouch(0.0)
    before = time.monotonic()
    keepalive.beat()
    assert [member.lifeline.vouched for member in crew] == [True, False, True]
    latest = time.monotonic() + TIMEOUT_S
    assert before + TIMEOUT_S <= crew[0].lifeline._read(_VOUCHED) <= latest


def test_the_leases_of_the_dead_are_not_renewed(db, keepalive, crew):
    """Their neighbours' heartbeat is committed all the same."""
    for member in crew[:2]:
        member.hand.claim(*submit(db, min_memory_mb=100))
        member.beat = Beat(1, 0, 0, draining=False)
    soon = datetime.now(UTC).replace(tzinfo=None, microsecond=0) + timedelta(seconds=1)
    db.write(lambda conn: conn.execute(update(schema.leases).values(expires_at=soon)))
    dead = schema.workers.c.worker_id == crew[1].hand.worker_id
    db.write(lambda conn: conn.execute(update(schema.workers).where(dead).values(status="lost")))
    keepalive.beat()
    until = {lease.worker_id: lease.expires_at for lease in active_leases(db)}
    assert until[crew[1].hand.worker_id] == soon < until[crew[0].hand.worker_id]


def test_what_cannot_be_written_of_one_is_no_trouble_of_the_others(db, keepalive, crew):
    crew[1].beat = Beat(0, 0, 0, draining=False, load_seconds=float("nan"), trouble="\ud800")
    keepalive.beat()
    assert [member.heard(db) for member in crew] == [True, False, True]
    crew[1].beat = Beat(0, 0, 0, draining=False)
    keepalive.beat()
    assert crew[1].heard(db)


#: Seconds that a beat may take at most: one lock wait of the sample, and what a busy machine adds.
BOUND_S = 4.0


@pytest.fixture
def busy(maria_db, settings, backend) -> Iterator[tuple[Keepalive, list[Member], str]]:
    """Three workers with a leased job each that reports its progress; the job of the second."""
    db = maria_db
    watch = Watch(backend, 5.0)
    keepalive = Keepalive(db, "node-1", watch, settings(worker_timeout_s=TIMEOUT_S))
    members = joined(db, keepalive, 3)
    job_ids = []
    for member in members:
        (claim,) = member.hand.claim(*submit(db, min_memory_mb=100))
        report = (claim.job_id, claim.attempt, 0.5, "half")
        member.beat = Beat(1, 0, 0, draining=False, held=(claim.job_id,), progress=(report,))
        job_ids.append(claim.job_id)
    keepalive.beat()
    make_old(db)
    hours_ago = datetime(LONG_AGO, 1, 1, tzinfo=UTC)
    db.write(lambda conn: conn.execute(update(schema.leases).values(last_heartbeat=hours_ago)))
    yield keepalive, members, job_ids[1]
    watch.close()


def beat_took(keepalive: Keepalive) -> float:
    before = time.monotonic()
    keepalive.beat()
    return time.monotonic() - before


def test_a_held_job_row_costs_only_its_progress(maria_db, busy):
    keepalive, crew, job_id = busy
    for member in crew:
        ((held, attempt, *_),) = member.beat.progress
        member.beat = replace(member.beat, progress=((held, attempt, 0.75, "more"),))
    with holding(maria_db, schema.jobs, schema.jobs.c.job_id == job_id):
        assert beat_took(keepalive) < BOUND_S
    assert all(member.heard(maria_db) for member in crew)
    assert sorted(row.progress for row in rows(maria_db, schema.jobs)) == [0.5, 0.75, 0.75]
    keepalive.beat()
    assert {row.progress for row in rows(maria_db, schema.jobs)} == {0.75}


@pytest.mark.parametrize("read", [False, True])
def test_a_held_worker_row_silences_that_worker_alone(maria_db, busy, read):
    keepalive, crew, _ = busy
    until = crew[1].lifeline.until
    with holding(maria_db, schema.workers, schema.workers.c.worker_id == crew[1].hand.worker_id, read=read):
        assert beat_took(keepalive) < BOUND_S
    assert [member.heard(maria_db) for member in crew] == [True, False, True]
    assert crew[1].lifeline.until == until < crew[0].lifeline.until
    assert [member.told for member in crew] == [[], [], []], "nobody is lost"
    keepalive.beat()
    assert crew[1].heard(maria_db)


def test_a_held_entry_of_an_index_silences_that_worker_alone(maria_db, busy):
    """Not its row: a read that an index answers, and that locks (SERIALIZABLE, INSERT … SELECT), holds nothing else."""
    keepalive, crew, _ = busy
    mine = schema.workers.c.worker_id == crew[1].hand.worker_id
    apart = datetime(LONG_AGO - 10, 1, 1, tzinfo=UTC)
    maria_db.write(lambda conn: conn.execute(update(schema.workers).where(mine).values(last_heartbeat=apart)))
    entry = walking(select(schema.workers.c.worker_id), schema.workers, "ix_workers_liveness")
    entry = entry.where(schema.workers.c.status == "active", schema.workers.c.last_heartbeat == apart)
    with maria_db.engine.connect() as other:
        other.execute(text("SET SESSION idle_transaction_timeout = 0"))
        assert other.execute(entry.with_for_update(read=True)).all()
        assert beat_took(keepalive) < BOUND_S
        assert [member.heard(maria_db) for member in crew] == [True, False, True]
        other.rollback()
        other.invalidate()
    keepalive.beat()
    assert crew[1].heard(maria_db)
    patience = maria_db.write(lambda conn: conn.execute(text("SELECT @@innodb_lock_wait_timeout")).scalar())
    assert patience == 1, "others wait as before"


@pytest.mark.parametrize("read", [False, True])
def test_a_held_lease_is_vouched_for_no_longer_and_all_others_are(maria_db, busy, read):
    keepalive, crew, job_id = busy
    until = crew[1].lifeline.until
    with holding(maria_db, schema.leases, schema.leases.c.job_id == job_id, read=read):
        assert beat_took(keepalive) < BOUND_S
    assert all(member.heard(maria_db) for member in crew)
    extended = {lease.worker_id: lease.last_heartbeat.year > LONG_AGO for lease in active_leases(maria_db)}
    assert [extended[member.hand.worker_id] for member in crew] == [True, False, True]
    assert crew[1].lifeline.until == until < crew[0].lifeline.until
    keepalive.beat()
    assert crew[1].lifeline.until > until


def test_a_lease_that_is_held_for_a_moment_is_vouched_for_since_it_was_extended_lately(maria_db, busy):
    keepalive, crew, job_id = busy
    keepalive._settings = keepalive._settings.model_copy(update={"worker_heartbeat_s": 60.0})
    keepalive.beat()
    until = crew[1].lifeline.until
    with holding(maria_db, schema.leases, schema.leases.c.job_id == job_id):
        keepalive.beat()
    assert crew[1].lifeline.until > until


@pytest.mark.parametrize("table", [schema.gpus, schema.nodes])
def test_what_belongs_to_the_node_silences_no_worker(maria_db, busy, table):
    keepalive, crew, _ = busy
    maria_db.write(
        lambda conn: conn.execute(update(schema.nodes).values(last_heartbeat=datetime(LONG_AGO, 1, 1, tzinfo=UTC)))
    )
    with holding(maria_db, table):
        assert beat_took(keepalive) < BOUND_S
    assert all(member.heard(maria_db) for member in crew)
    assert (rows(maria_db, schema.nodes)[0].last_heartbeat.year > LONG_AGO) == (table is schema.gpus)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_where_one_writes_at_a_time_nobody_tries_in_halves(db_url, open_database, keepalive):
    """Each would wait as long as all of them."""
    db = open_database(db_url, db_timeout_s=0.2)
    keepalive._db = db
    joined(db, keepalive, 3)
    with traffic(db) as seen, open_database(db_url).engine.begin():
        keepalive.beat()
    assert seen.statements == ["BEGIN IMMEDIATE"]


def test_who_joins_while_its_row_is_held_is_told_so(maria_db, keepalive):
    member = Member(hire(maria_db))
    keepalive.start()
    with (
        holding(maria_db, schema.workers, schema.workers.c.worker_id == member.hand.worker_id),
        pytest.raises(DatabaseUnavailable, match="holds the row"),
    ):
        keepalive.join(member.pulse)
    keepalive.close()


def test_a_worker_that_breaks_silences_nobody_else(db, keepalive, crew):
    crew[0].breaks = True
    keepalive.beat()
    assert [member.heard(db) for member in crew] == [False, True, True]


def test_who_breaks_when_it_is_told_keeps_nobody_from_being_told(db, keepalive, crew):
    (claim,) = crew[2].hand.claim(*submit(db))
    db.write(lambda conn: withdraw.cancel(conn, claim.job_id))
    crew[2].beat = Beat(1, 0, 0, draining=False, held=(claim.job_id,))
    crew[0].pulse.on_cancelled = lambda _jobs: 1 / 0
    keepalive.beat()
    assert crew[2].told == [[claim.job_id]]


def test_who_has_left_is_told_nothing_more(db, keepalive, crew, monkeypatch):
    """A beat under way when it leaves ends without it: what it would write to may be closed by then."""
    write, told = db.write, list[int]()
    for number, member in enumerate(crew):
        member.pulse.on_sampled = lambda _sample, _findings, number=number: told.append(number)

    def leaves_meanwhile(work: Any, *given: Any, **more: Any) -> Any:
        keepalive.leave(crew[1].pulse)
        return write(work, *given, **more)

    monkeypatch.setattr(db, "write", leaves_meanwhile)
    keepalive.beat()
    assert told == [0, 2]
    keepalive.beat()
    assert told == [0, 2, 0, 2]


def test_joining_waits_for_the_first_heartbeat(db, keepalive):
    member = Member(hire(db))
    make_old(db)
    keepalive.start()
    keepalive.join(member.pulse)
    assert member.heard(db)
    keepalive.close()


@pytest.mark.parametrize("error", [WorkerLost, DatabaseUnavailable])
def test_joining_says_why_it_failed(db, keepalive, monkeypatch, error):
    member = Member(hire(db))
    if error is DatabaseUnavailable:
        monkeypatch.setattr(db, "write", away)
    else:
        db.write(lambda conn: conn.execute(update(schema.workers).values(status="lost")))
    keepalive.start()
    with pytest.raises(error):
        keepalive.join(member.pulse)
    keepalive.close()


def test_a_poke_makes_everybody_heard_now(keepalive, crew):
    keepalive._interval_s = 600.0
    heard = threading.Event()
    crew[1].pulse.on_sampled = lambda _sample, _findings: heard.set()
    keepalive.start()
    keepalive.poke()
    assert heard.wait(10.0)
    keepalive.close()
