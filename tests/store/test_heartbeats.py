"""Heartbeats over HTTP, as batches: what each hears, what all cost, and that nobody's held row is a neighbour's."""

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from sqlalchemy import text, update

from orchestrator.errors import JobNotFound, LeaseEnded, LeaseNotFound, NotOwner, WorkerLost, WorkerNotFound
from orchestrator.leases import Granted, LeaseRequest, Terms, token_hash
from orchestrator.store import grants, registry, renewals, reports, schema, withdraw
from orchestrator.store.database import RowsHeld
from orchestrator.store.dialect import utc_shift
from orchestrator.store.dispatch import Claiming, Fetch
from orchestrator.store.registry import Told
from orchestrator.store.reports import Heard, Report, Sign
from tests.factories import POLICY, STALE_S, active_leases, gpu, hire, holding, now, row, rows, submit, traffic
from tests.fetchers import claimant, enlist
from tests.store.test_statement_counts import statements
from tests.waiting import wait_until


def lease(db, count, **fields):
    """So many clients' leases; their keys."""
    wishes = [LeaseRequest("alice", 10, 60.0, **fields) for _ in range(count)]
    answers = db.write(lambda conn: grants.grant(conn, wishes, Terms(STALE_S)))
    assert all(isinstance(answer, Granted) for answer in answers)
    return [token_hash(answer.request.token) for answer in answers]


def change(db, key, **values):
    mine = update(schema.leases).where(schema.leases.c.token == key)
    db.write(lambda conn: conn.execute(mine.values(**values)))


def extend(db, keys, **how):
    return db.write(lambda conn: renewals.renew(conn, keys, **how))


def hear(db, *beats, **how):
    return db.write(lambda conn: registry.heartbeats(conn, beats, **how))


def kinds(answers):
    return [type(answer) for answer in answers]


def holding_lease(db, key):
    return holding(db, schema.leases, schema.leases.c.token == key)


def holding_worker(db, remote):
    return holding(db, schema.workers, schema.workers.c.worker_id == remote.worker_id)


# --- leases ---


def test_each_lease_gets_its_own_verdict(db):
    hire(db, gpu())
    good, old, over, ending, lost, short = keys = lease(db, 6)
    change(db, old, expires_at=utc_shift(-1.0))
    change(db, over, state="released")
    change(db, ending, ending_as="expired")
    change(db, lost, state="expired", end_reason="GPU-0 was lost")
    change(db, short, ttl_seconds=0.000001)
    before = {one.token: one for one in rows(db, schema.leases)}
    answers = extend(db, [*keys, "nobody's", good])
    assert kinds(answers) == [datetime, *[LeaseEnded] * 4, datetime, LeaseNotFound, datetime]
    parts = ("is expired;", "is released;", "is expired;", "(GPU-0 was lost)")
    assert all(part in str(answer) for part, answer in zip(parts, answers[1:5], strict=True)), answers
    after = {one.token: one for one in rows(db, schema.leases)}
    assert answers[0] == answers[-1] == after[good].expires_at >= before[good].expires_at
    assert answers[5] == after[short].expires_at, "extended, however short its life is"
    for key in (old, over, ending, lost):
        assert after[key] == before[key]


def test_100_leases_are_three_statements_and_one_commit(db):
    hire(db, gpu())
    keys = lease(db, 100)
    with traffic(db) as seen:
        assert kinds(extend(db, keys)) == [datetime] * 100
    assert len(statements(seen)) == 3, seen.statements
    assert seen.commits == 1


def test_a_lease_that_somebody_holds_is_left_out_and_none_of_the_others(maria_db):
    hire(maria_db, gpu())
    first, held, last = keys = lease(maria_db, 3)
    for key in keys:
        change(maria_db, key, last_heartbeat=None)
    with holding_lease(maria_db, held), traffic(maria_db) as seen:
        assert kinds(extend(maria_db, keys)) == [datetime, RowsHeld, datetime]
    assert len(statements(seen)) == 3, "tried once, and waited for by nobody"
    assert {one.token for one in rows(maria_db, schema.leases) if one.last_heartbeat} == {first, last}
    assert kinds(extend(maria_db, keys)) == [datetime] * 3


def test_a_lease_whose_heartbeat_came_in_time_is_not_over_for_the_next_one(maria_db):
    """The first is not committed yet when the second comes, a moment too late by what it can see."""
    hire(maria_db, gpu())
    (key,) = lease(maria_db, 1)
    change(maria_db, key, expires_at=utc_shift(-1.0))
    with maria_db.engine.begin() as first:
        mine = update(schema.leases).where(schema.leases.c.token == key)
        first.execute(mine.values(expires_at=utc_shift(60.0)))
        assert kinds(extend(maria_db, [key])) == [RowsHeld]
    assert kinds(extend(maria_db, [key])) == [datetime]


def test_a_lease_that_is_over_is_so_once_nobody_holds_it(maria_db):
    hire(maria_db, gpu())
    over, ended = keys = lease(maria_db, 2)
    change(maria_db, over, expires_at=utc_shift(-1.0))
    change(maria_db, ended, state="released")
    with holding_lease(maria_db, over), holding_lease(maria_db, ended):
        assert kinds(extend(maria_db, keys)) == [RowsHeld, LeaseEnded]
    assert kinds(extend(maria_db, keys)) == [LeaseEnded] * 2


# --- workers ---


def test_each_worker_gets_its_own_verdict(db):
    alive, lost, left, ours = enlist(db), enlist(db), enlist(db), hire(db)
    for remote, status in ((lost, "lost"), (left, "stopped")):
        mine = update(schema.workers).where(schema.workers.c.worker_id == remote.worker_id).values(status=status)
        db.write(lambda conn, mine=mine: conn.execute(mine))
    ids = [alive.worker_id, lost.worker_id, left.worker_id, ours.worker_id, "nobody"]
    answers = hear(db, *[Told(worker_id, busy=3) for worker_id in ids])
    assert kinds(answers) == [type(None), WorkerLost, WorkerLost, WorkerNotFound, WorkerNotFound]
    assert {one.worker_id for one in rows(db, schema.workers) if one.busy} == {alive.worker_id}


def test_each_worker_keeps_what_it_does_not_tell_and_its_last_word_counts(db):
    one, two, three = enlist(db), enlist(db), enlist(db)
    assert hear(db, Told(one.worker_id, 1, 2, 3), Told(two.worker_id, 4, 5, 6)) == [None] * 2
    said = [
        Told(one.worker_id, jobs_done=9),
        Told(two.worker_id, busy=0),
        Told(three.worker_id),
        Told(one.worker_id, 7),
    ]
    assert hear(db, *said) == [None] * 4
    found = {one.worker_id: (one.busy, one.jobs_done, one.jobs_failed) for one in rows(db, schema.workers)}
    assert found == {one.worker_id: (7, 9, 3), two.worker_id: (0, 5, 6), three.worker_id: (0, 0, 0)}


def fetch_each(db, remotes):
    """A claim for each of them, all in one transaction."""
    return [claim for (claim,) in db.write(Claiming([Fetch(remote.worker_id, 1) for remote in remotes], claimant))]


def busy_workers(db, count):
    """HTTP workers, each with a job under a lease, silent for an hour."""
    hire(db, gpu())
    remotes, _ = [enlist(db, node="node-1") for _ in range(count)], submit(db, count, min_memory_mb=10)
    fetch_each(db, remotes)
    for table in (schema.workers, schema.leases, schema.nodes):
        db.write(lambda conn, table=table: conn.execute(update(table).values(last_heartbeat=utc_shift(-3600.0))))
    return remotes


def lately(db, found):
    """Whose last heartbeat was not an hour ago."""
    since = now(db) - timedelta(minutes=30)
    return {one.worker_id for one in found if one.last_heartbeat > since}


def extended(db):
    return lately(db, active_leases(db))


def heard(db):
    return lately(db, rows(db, schema.workers))


def test_50_workers_with_leases_are_eight_statements_and_one_commit(db):
    remotes = busy_workers(db, 50)
    ids = {remote.worker_id for remote in remotes}
    with traffic(db) as seen:
        assert hear(db, *[Told(worker_id, busy=1) for worker_id in ids]) == [None] * 50
    assert heard(db) == extended(db) == ids
    # The workers: locked, written. Their leases: found, locked, extended. Their node: looked at, locked, written.
    assert len(statements(seen)) == 8, seen.statements
    assert seen.commits == 1
    db.write(lambda conn: conn.execute(update(schema.nodes).values(last_heartbeat=utc_shift(60.0))))
    with traffic(db) as again:
        hear(db, *[Told(worker_id, busy=1) for worker_id in ids])
    assert len(statements(again)) == 6, "the node was seen just now"


def test_a_worker_that_somebody_holds_is_left_out_and_none_of_the_others(maria_db):
    held, free = busy_workers(maria_db, 2)
    beats = [Told(held.worker_id, busy=2), Told(free.worker_id, busy=3)]
    with holding_worker(maria_db, held), traffic(maria_db) as seen:
        assert kinds(hear(maria_db, *beats)) == [RowsHeld, type(None)]
    assert len(statements(seen)) == 9, "tried once, and one look who the others are"
    assert heard(maria_db) == extended(maria_db) == {free.worker_id}
    assert hear(maria_db, *beats) == [None] * 2


def test_a_worker_with_a_lease_that_somebody_holds_lives_and_hears_that_it_was_not_extended(maria_db):
    held, free = busy_workers(maria_db, 2)
    (key,) = [one.token for one in active_leases(maria_db) if one.worker_id == held.worker_id]
    beats = [Told(held.worker_id), Told(free.worker_id)]
    with holding_lease(maria_db, key):
        assert kinds(hear(maria_db, *beats)) == [RowsHeld, type(None)]
        assert (heard(maria_db), extended(maria_db)) == ({held.worker_id, free.worker_id}, {free.worker_id})
    assert hear(maria_db, *beats) == [None] * 2
    assert extended(maria_db) == {held.worker_id, free.worker_id}


def test_a_node_that_somebody_holds_costs_its_workers_nothing(maria_db):
    busy, _ = busy_workers(maria_db, 2)
    with holding(maria_db, schema.nodes, schema.nodes.c.node_id == "node-1"):
        assert hear(maria_db, Told(busy.worker_id)) == [None]
    assert heard(maria_db) == {busy.worker_id}


def test_rows_are_waited_for_only_in_turn(maria_db):
    (remote,) = busy_workers(maria_db, 1)
    (key,) = [one.token for one in active_leases(maria_db)]
    for hold in (holding_lease(maria_db, key), holding_worker(maria_db, remote)):
        with hold, pytest.raises(RowsHeld):
            maria_db.write_at_once(lambda conn: registry.heartbeats(conn, [Told(remote.worker_id)], in_turn=True))
    with holding_lease(maria_db, key), pytest.raises(RowsHeld):
        maria_db.write_at_once(lambda conn: renewals.renew(conn, [key], in_turn=True))


def test_a_lease_that_ended_while_its_turn_was_waited_for_is_held_by_nobody(maria_db):
    (remote,) = busy_workers(maria_db, 1)
    (key,) = [one.token for one in active_leases(maria_db)]
    ended = update(schema.leases).where(schema.leases.c.token == key).values(state="spent")
    waiting = text("SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'SELECT orch%leases%UPDATE'")
    beat = [Told(remote.worker_id)]
    with maria_db.engine.connect() as ending, ThreadPoolExecutor(1) as thread:
        ending.execute(ended)
        late = thread.submit(hear, maria_db, *beat, in_turn=True)
        wait_until(lambda: maria_db.read(lambda conn: conn.execute(waiting).scalar()), what="it waits in turn")
        ending.commit()
        assert late.result() == [None]


# --- jobs ---


def test_signs_of_30_workers_are_three_statements_and_one_commit(db):
    """The workers, the jobs, how far they are."""
    remotes, _ = [enlist(db) for _ in range(30)], submit(db, 30)
    claims = fetch_each(db, remotes)
    signs = [
        Report(remote.worker_id, Sign(claim.job_id, claim.attempt, number / 32, f"step {number}"))
        for number, (remote, claim) in enumerate(zip(remotes, claims, strict=True))
    ]
    db.write(lambda conn: reports.write(conn, signs, POLICY))
    with traffic(db) as seen:
        assert db.write(lambda conn: reports.write(conn, signs, POLICY)) == [Heard(cancel_requested=False)] * 30
    assert len(statements(seen)) == 3, seen.statements
    assert seen.commits == 1
    found = {job.job_id: job for job in rows(db, schema.jobs)}
    for number, claim in enumerate(claims):
        job = found[claim.job_id]
        assert (job.status, job.progress, job.progress_note) == ("running", number / 32, f"step {number}")


def test_each_sign_gets_its_own_answer_and_keeps_what_it_does_not_tell(db):
    one, other, _ = enlist(db), enlist(db), submit(db, 4)
    first, second, third, fourth = [*one.fetch(3), *other.fetch(1)]
    one.report(Sign(first.job_id, 1, 0.25, "quarter"))
    db.write(lambda conn: withdraw.cancel(conn, second.job_id))
    batch = [
        Report(one.worker_id, Sign(first.job_id, 1, 0.5)),
        Report(one.worker_id, Sign(second.job_id, 1, None, "stopping")),
        Report(other.worker_id, Sign(third.job_id, 1, 0.9)),
        Report(other.worker_id, Sign(fourth.job_id, 2, 0.9)),
        Report("nobody", Sign(fourth.job_id, 1, 0.9)),
        Report(one.worker_id, Sign("no-such-job", 1)),
        Report(other.worker_id, Sign(fourth.job_id, 1)),
    ]
    answers = db.write(lambda conn: reports.write(conn, batch, POLICY))
    go_on, stop = Heard(cancel_requested=False), Heard(cancel_requested=True)
    assert [answers[0], answers[1], answers[6]] == [go_on, stop, go_on]
    assert kinds(answers[2:6]) == [NotOwner, NotOwner, NotOwner, JobNotFound]
    found = [row(db, claim.job_id) for claim in (first, second, third, fourth)]
    assert [(job.status, job.progress, job.progress_note) for job in found] == [
        ("running", 0.5, "quarter"),
        ("running", None, "stopping"),
        ("claimed", None, None),
        ("running", None, None),
    ]
