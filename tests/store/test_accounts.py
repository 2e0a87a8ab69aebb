"""Ranks as they are stored: shares by weight, first come first served, and a clock that only service moves."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from orchestrator.policies import AgentPolicy, Book
from orchestrator.ranking import UNIT
from orchestrator.store import outbox, schema
from orchestrator.store.submit import MANY, Verdict, submit_jobs
from tests.factories import POLICY, new_job, row, rows, set_job, submit
from tests.fetchers import enlist

WEIGHTS = Book(agents={"one": AgentPolicy(weight=1), "three": AgentPolicy(weight=3)})


def submit_as(db, agent, count, book=WEIGHTS, **fields):
    batch = [new_job(agent=agent, **fields) for _ in range(count)]
    assert set(submit_jobs(db, batch, POLICY, book=lambda _conn: book)) == {Verdict.CREATED}
    return [job.job_id for job in batch]


def take(db, limit, lane="default"):
    return [job.job_id for job in db.write(lambda conn: outbox.take(conn, lane, limit))]


def virtual_time(db):
    return next(lane.virtual_time for lane in rows(db, schema.lanes) if lane.lane == "default")


def accounts(db):
    return {(found.lane, found.agent): found.last_rank for found in rows(db, schema.lane_accounts)}


def agents(db, ids):
    of = {job.job_id: job.agent for job in rows(db, schema.jobs)}
    return Counter(of[job_id] for job_id in ids)


@pytest.mark.parametrize("batch", [10, MANY + 10])
def test_two_agents_share_a_lane_by_their_weights_and_a_third_comes_in_between(db, batch):
    for _ in range(300 // batch):
        submit_as(db, "one", batch)
    for _ in range(300 // batch):
        submit_as(db, "three", batch)
    for _ in range(3):
        assert agents(db, take(db, 100))["three"] == pytest.approx(75, abs=1)
    (late,) = submit_as(db, "late", 1)
    assert late in take(db, 6)


@pytest.mark.parametrize("batch", [3, MANY])
def test_batches_of_one_agent_stand_one_behind_the_other(db, batch):
    ids = [job_id for _ in range(4) for job_id in submit_as(db, "one", batch)]
    assert accounts(db) == {("default", "one"): 4 * batch * UNIT}
    assert take(db, 4 * batch) == ids


def test_submissions_at_the_same_moment_get_no_place_twice(db):
    barrier = Barrier(6)

    def race(n):
        barrier.wait(30)
        return [submit_as(db, ("one", "three")[n % 2], size) for size in (2, MANY, 5)]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(race, range(6)))
    jobs = rows(db, schema.jobs)
    for agent in ("one", "three"):
        ranks = [job.rank for job in jobs if job.agent == agent]
        assert len(set(ranks)) == len(ranks) == 3 * (MANY + 7)
        # A charge in vain would leave a hole, and cost a share; nothing failed here.
        assert max(ranks) == accounts(db)["default", agent]


def test_an_account_is_of_one_lane(db):
    submit_as(db, "one", 5)
    submit_as(db, "one", 2, pool_id="other")
    assert accounts(db) == {("default", "one"): 5 * UNIT, ("other", "one"): 2 * UNIT}


def test_cost_says_how_much_of_a_share_a_job_takes(db):
    submit_as(db, "one", 1, cost_units=2.5)
    submit_as(db, "one", 1, expected_duration_sec=10, gpu_count=2)
    submit_as(db, "one", 1, cost_units=0)
    assert [job.rank for job in sorted(rows(db, schema.jobs), key=lambda job: job.rank)] == [2500, 22_500, 22_510]


def test_only_new_jobs_are_charged(db):
    job = new_job(job_id="same", agent="one")
    assert submit_jobs(db, [job], POLICY) == [Verdict.CREATED]
    assert submit_jobs(db, [job, new_job(agent="one")], POLICY) == [Verdict.EXISTS, Verdict.CREATED]
    assert accounts(db) == {("default", "one"): 2 * UNIT}


@pytest.mark.parametrize("count", [3, MANY])
def test_a_submission_whose_commit_was_answered_by_silence_keeps_its_order(db, lose_commits, count):
    batch = [new_job(agent="one") for _ in range(count)]
    lose_commits(1)
    assert set(submit_jobs(db, batch, POLICY)) == {Verdict.EXISTS}
    after = submit_as(db, "one", 2)
    assert take(db, count + 2) == [*(job.job_id for job in batch), *after]


def test_the_clock_follows_what_is_announced_and_only_forwards(db):
    ids = submit_as(db, "one", 10)
    assert virtual_time(db) == 0
    take(db, 4)
    assert virtual_time(db) == 4 * UNIT
    set_job(db, ids[0], queued="ready")
    assert take(db, 1) == [ids[0]]
    assert virtual_time(db) == 4 * UNIT


def test_who_jumps_ahead_does_not_move_the_clock(db):
    submit_as(db, "one", 10)
    (high,) = submit_as(db, "one", 1, priority="HIGH")
    assert take(db, 1) == [high]
    assert virtual_time(db) == 0
    # Or this one would stand behind all that "one" has waiting.
    (other,) = submit_as(db, "late", 1)
    assert other in take(db, 2)


def test_who_was_held_back_moves_the_clock_to_its_tag(db):
    submit_as(db, "one", 2, priority="LOW")
    take(db, 2)
    assert virtual_time(db) == 2 * UNIT


def test_http_workers_move_the_clock_where_nobody_reads_the_stream(db):
    """Otherwise whoever comes new there would stand before all who waited for long."""
    remote = enlist(db)
    submit_as(db, "one", 40)
    for _ in range(4):
        remote.finish(*remote.fetch(4))
    assert virtual_time(db) > 0
    submit_as(db, "late", 40)
    claims = remote.fetch(4)
    assert {row(db, claim.job_id).agent for claim in claims} == {"one", "late"}


def test_an_old_database_continues_behind_what_waits(db):
    """Ranks were microseconds once; the migration sets the clock to the last of them."""
    (old,) = submit(db)
    moment = 1_790_000_000_000_000
    set_job(db, old, rank=moment)
    db.write(lambda conn: conn.execute(schema.lanes.update().values(virtual_time=moment)))
    new = submit_as(db, "late", 2)
    assert take(db, 3) == [old, *new]
