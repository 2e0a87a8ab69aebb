"""Submitting: one row per job_id, whatever races, repeats or breaks."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, timedelta
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import event

from orchestrator.admission import FREELY
from orchestrator.errors import JobNotFound, QueueFull, Unavailable
from orchestrator.jobs import NewJob
from orchestrator.store import job_reads, schema
from orchestrator.store.submit import Verdict, submit_jobs
from tests.factories import POLICY, history, new_job, now, row, rows, submit


def test_a_submitted_job_is_pending_unpublished_and_audited(db):
    (job_id,) = submit(db, agent="crawler", pool_id="big", tags=["a"], priority="HIGH")
    job = row(db, job_id)
    assert (job.status, job.queued, job.attempt, job.attempts) == ("pending", "ready", 0, 0)
    assert (job.agent, job.lane, job.priority, job.max_attempts) == ("crawler", "big", 50, 5)
    assert history(db, job_id) == ["job.submitted"]
    assert [lane.lane for lane in rows(db, schema.lanes)] == ["big"]


def test_the_same_content_again_exists_and_other_content_conflicts(db):
    job, same, other = (new_job(job_id="j", payload={"n": n}) for n in (1, 1, 2))
    assert submit_jobs(db, [job], POLICY) == [Verdict.CREATED]
    assert submit_jobs(db, [same, other], POLICY) == [Verdict.EXISTS, Verdict.CONFLICT]
    assert history(db, "j") == ["job.submitted"]


def test_one_batch_may_hold_the_same_job_twice(db):
    batch = [new_job(job_id="j", payload={"n": n}) for n in (1, 1, 2)]
    assert submit_jobs(db, batch, POLICY) == [Verdict.CREATED, Verdict.EXISTS, Verdict.CONFLICT]
    assert len(rows(db, schema.jobs)) == 1


def test_nobody_hears_that_a_job_is_there_whose_first_copy_was_not_let_in(db):
    batch = [new_job(job_id=name, payload={"n": n}) for name, n in (("j", 1), ("k", 1), ("j", 1), ("j", 2), ("k", 1))]
    full = QueueFull("too many")
    decide = lambda _conn, fresh: [full if one.job_id == "j" else FREELY for one in fresh]
    answers = submit_jobs(db, batch, POLICY, decide)
    assert answers == [full, Verdict.CREATED, full, full, Verdict.EXISTS]
    assert [one.job_id for one in rows(db, schema.jobs)] == ["k"]


def test_ids_that_differ_in_case_are_two_jobs(db):
    assert submit_jobs(db, [new_job(job_id="a"), new_job(job_id="A")], POLICY) == [Verdict.CREATED] * 2


def test_a_job_keeps_what_was_asked_for(db):
    wish: dict[str, Any] = {
        "model_id": "m",
        "min_memory_mb": 100,
        "gpu_count": 2,
        "cpu_fallback": True,
        "expected_duration_sec": 1.5,
        "max_runtime_sec": 2.5,
        "max_attempts": 7,
        "payload": {"ключ": "значение 🦊", "n": [1, 2.5, None, True]},
        "tags": ["x", "y"],
    }
    (job_id,) = submit(db, **wish)
    record = db.read(lambda conn: job_reads.get(conn, job_id))
    assert {key: record[key] for key in wish} == wish


def test_a_job_for_later_is_delayed_and_one_for_the_past_is_not(db):
    later = now(db).replace(tzinfo=UTC) + timedelta(hours=1)
    (waiting,) = submit(db, earliest_start_at=later.isoformat())
    (due,) = submit(db, earliest_start_at="2001-01-01T00:00:00Z")
    assert (row(db, waiting).queued, row(db, due).queued) == ("delayed", "ready")
    assert abs(row(db, waiting).not_before - later.replace(tzinfo=None)) < timedelta(seconds=1)


def test_rank_follows_the_order_of_a_batch_not_of_its_ids(db):
    batch = [new_job(job_id=f"{letter}-{n}") for n, letter in enumerate("zyxwv")]
    submit_jobs(db, batch, POLICY)
    ranked = sorted(rows(db, schema.jobs), key=lambda job: job.rank)
    assert [job.job_id for job in ranked] == [job.job_id for job in batch]


def test_times_come_from_the_clock_of_the_database(db):
    before = now(db)
    (job_id,) = submit(db)
    assert before <= row(db, job_id).created_at <= now(db)


def test_many_threads_and_two_processes_worth_of_connections_create_one_job(db, db_url, open_database):
    other, threads = open_database(db_url), 200
    barrier = Barrier(threads)

    def race(n):
        barrier.wait(30)
        return submit_jobs((db, other)[n % 2], [new_job(job_id="one")], POLICY)[0]

    with ThreadPoolExecutor(threads) as pool:
        verdicts = list(pool.map(race, range(threads)))
    assert Counter(verdicts) == {Verdict.CREATED: 1, Verdict.EXISTS: threads - 1}
    assert len(rows(db, schema.jobs)) == len(rows(db, schema.audit)) == 1


def test_overlapping_batches_in_opposite_order_all_succeed(db):
    ids = [f"job-{n:03}" for n in range(60)]
    barrier = Barrier(4)

    def race(n):
        order = ids[::-1] if n % 2 else ids
        barrier.wait(30)
        return submit_jobs(db, [new_job(job_id=job_id) for job_id in order], POLICY)

    with ThreadPoolExecutor(4) as pool:
        verdicts = [verdict for answer in pool.map(race, range(4)) for verdict in answer]
    assert verdicts.count(Verdict.CREATED) == 60
    assert verdicts.count(Verdict.EXISTS) == 180
    assert len(rows(db, schema.audit)) == 60


def test_rows_are_inserted_in_the_order_of_their_keys(db):
    """What keeps two batches that share ids from waiting for each other in a circle."""
    sent: list[Any] = []

    def note(_conn, _cursor, statement, parameters, *_rest):
        if statement.startswith("INSERT INTO orchestrator_jobs"):
            flat = parameters if isinstance(parameters, tuple) else [v for p in parameters for v in p.values()]
            sent.extend(value for value in flat if str(value).startswith("key-"))

    event.listen(db.engine, "before_cursor_execute", note)
    submit_jobs(db, [new_job(job_id=f"key-{n}") for n in (3, 1, 2, 5, 4)], POLICY)
    event.remove(db.engine, "before_cursor_execute", note)
    assert sent == [f"key-{n}" for n in (1, 2, 3, 4, 5)]


def test_different_lanes_may_appear_at_the_same_moment(db):
    barrier = Barrier(8)

    def race(n):
        barrier.wait(30)
        return submit(db, 3, pool_id=f"lane-{n % 2}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(race, range(8)))
    assert sorted(lane.lane for lane in rows(db, schema.lanes)) == ["lane-0", "lane-1"]
    assert len(rows(db, schema.jobs)) == 24


def test_a_submit_whose_commit_was_answered_by_silence_is_not_stored_twice(db, lose_commits):
    job = new_job(job_id="once")
    lose_commits(1)
    # Nobody can tell any more who created it; the caller learns that it is there, and it is there once.
    assert submit_jobs(db, [job], POLICY) == [Verdict.EXISTS]
    assert history(db, "once") == ["job.submitted"]


def test_a_job_that_does_not_fit_its_columns_is_refused_alone(maria_db):
    """The batcher splits a batch on this error; on 'unavailable' it would fail the neighbours as well."""
    bad = NewJob.prepare({"type": "echo", "payload": {}}, 1 << 20, 64, trace_context="x" * 500)
    with pytest.raises(Exception, match="too long") as refused:
        submit_jobs(maria_db, [new_job(job_id="good"), bad], POLICY)
    assert not isinstance(refused.value, Unavailable)
    assert rows(maria_db, schema.jobs) == []


def test_reading_an_unknown_job(db):
    with pytest.raises(JobNotFound):
        db.read(lambda conn: job_reads.get(conn, "nobody"))
