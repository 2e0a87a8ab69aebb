"""Dead letters: written with the end of their job, told at least once, and left only by redrive or purge."""

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import inf
from threading import Barrier

import pytest
from sqlalchemy import insert, update

from orchestrator import jobs as rules
from orchestrator.api.bulk import Chosen
from orchestrator.dead_letters import DeadLetter
from orchestrator.errors import InvalidInput, JobNotFound, NotRedrivable, RedriveLimit
from orchestrator.jobs import ErrorKind, Status
from orchestrator.store import audit, dead_letters, failures, lease_purge, paging, schema
from orchestrator.store.dead_letters import Filter
from orchestrator.store.dialect import utc_shift
from orchestrator.store.submit import Verdict, submit_jobs
from orchestrator.store.withdraw import cancel
from tests.factories import (
    POLICY,
    Hand,
    active_leases,
    done,
    failed,
    gpu,
    hire,
    history,
    many_jobs,
    new_job,
    now,
    row,
    rows,
    set_job,
    status,
    submit,
    write_as,
)


def bury(db, count=1, kind=ErrorKind.TRANSIENT, hand: Hand | None = None, **fields):
    """Jobs that used up their one attempt; their ids, oldest first."""
    # By name as well: SQLite's clock may show two of them at the same time.
    ids = sorted(submit(db, count, **({"max_attempts": 1} | fields)))
    again(db, ids, kind, hand)
    return ids


def again(db, ids, kind=ErrorKind.TRANSIENT, hand: Hand | None = None):
    hand = hand or hire(db)
    for claim in hand.claim(*ids):
        hand.record(ends=[failed(claim, kind, origin_id=f"7-{claim.attempt}")])
    assert {status(db, job_id) for job_id in ids} == {"dead_letter"}


def letters(db):
    return {letter.job_id: letter for letter in rows(db, schema.dead_letters)}


def redrive(db, ids, most=3, delay=lambda _n: 0.0, actor="somebody"):
    return write_as(actor, db, lambda conn: dead_letters.redrive(conn, ids, most, delay))


def redrive_one(db, job_id, most=3, actor="somebody", nth=None):
    return write_as(actor, db, lambda conn: dead_letters.redrive_one(conn, job_id, most, nth))


def purge(db, ids, actor="somebody"):
    return write_as(actor, db, lambda conn: dead_letters.purge(conn, ids))


def matching(db, wanted=Filter(), limit=1000, redrive_max=inf):  # noqa: B008 - frozen
    chosen = Chosen(limit, redrive_max)
    chosen.add(db.read(lambda conn: dead_letters.look(conn, wanted, None))[0])
    return chosen.ids


def untold(db):
    return db.read(lambda conn: dead_letters.untold(conn, 100))


# --- written ---


def test_a_letter_is_written_with_the_end_of_its_job(db):
    (job_id,) = bury(db, kind=ErrorKind.TIMEOUT)
    letter = letters(db)[job_id]
    assert (letter.reason, letter.attempts, letter.origin_id, letter.entry_id) == ("timeout", 1, "7-1", None)
    assert abs(letter.buried_at - row(db, job_id).finished_at) < timedelta(seconds=5)


def test_neither_comes_without_the_other(db, monkeypatch):
    """INV-6: one transaction."""
    hand = hire(db)
    (claim,) = hand.claim(*submit(db, max_attempts=1))

    def broken(*_args):
        raise RuntimeError("the power fails")

    monkeypatch.setattr(audit, "record", broken)  # the last statement of the transaction
    with pytest.raises(RuntimeError):
        hand.fail(claim)
    assert (status(db, claim.job_id), letters(db)) == ("claimed", {})


def test_a_lost_answer_writes_one_letter(db, lose_commits):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db, max_attempts=1))
    lose_commits(1)
    assert hand.fail(claim).arrow is rules.BURY
    assert len(letters(db)) == 1


def test_other_ends_write_none(db):
    hand = hire(db)
    claims = hand.claim(*submit(db, 3))
    hand.record(ends=[done(claims[0]), failed(claims[1]), failed(claims[2], ErrorKind.PERMANENT)])
    assert letters(db) == {}


def test_a_job_that_its_lost_worker_took_along_leaves_a_letter_too(db):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db, max_attempts=1))
    hand.lose()
    assert letters(db)[claim.job_id].reason == "worker_lost"


# --- told ---


def test_what_the_stream_was_told_is_not_told_again(db):
    first, second = bury(db, 2)
    found = {item.letter.job_id: item for item in untold(db)}
    assert found.keys() == {first, second}
    assert db.write(lambda conn: dead_letters.told(conn, {found[first]: "1-1"})) == []
    assert [item.letter for item in untold(db)] == [DeadLetter(second, "7-1", 1, "it broke", "transient")]
    assert letters(db)[first].entry_id == "1-1"


def test_a_letter_that_left_meanwhile_is_not_brought_back(db):
    (job_id,) = bury(db)
    (item,) = untold(db)
    redrive(db, [job_id])
    assert db.write(lambda conn: dead_letters.told(conn, {item: "1-1"})) == ["1-1"]
    assert letters(db) == {}


def test_a_job_that_dies_again_while_its_first_letter_is_told_gets_a_second(db):
    hand = hire(db)
    (job_id,) = submit(db, max_attempts=1)
    hand.fail(hand.claim(job_id)[0], ErrorKind.TRANSIENT)
    (item,) = untold(db)
    redrive(db, [job_id])
    hand.fail(hand.claim(job_id)[0], ErrorKind.TRANSIENT)
    assert db.write(lambda conn: dead_letters.told(conn, {item: "1-1"})) == ["1-1"]
    assert [again.letter.job_id for again in untold(db)] == [job_id]


def test_the_leader_tells_while_an_operator_redrives_and_neither_loses(maria_db):
    ids, barrier = bury(maria_db, 40), Barrier(2)
    found = untold(maria_db)

    def tell():
        barrier.wait(30)
        for n in range(20):
            maria_db.write(lambda conn, n=n: dead_letters.told(conn, dict.fromkeys(reversed(found), f"{n}-1")))

    def start_over():
        barrier.wait(30)
        return [job_id for n in range(0, 40, 4) for job_id in redrive(maria_db, ids[n : n + 4]).job_ids]

    with ThreadPoolExecutor(2) as pool:
        telling, started = pool.submit(tell), pool.submit(start_over)
        telling.result(60)
        assert sorted(started.result(60)) == sorted(ids)
    assert letters(maria_db) == {}


# --- redrive ---


def test_a_redriven_job_keeps_its_history_and_begins_its_charges_anew(db):
    hand = hire(db)
    (job_id,) = submit(db, max_attempts=2)
    for _ in range(2):
        (claim,) = hand.claim(job_id)
        hand.fail(claim, ErrorKind.WORKER_LOST)
    (item,) = db.read(lambda conn: dead_letters.untold(conn, 10))
    db.write(lambda conn: dead_letters.told(conn, {item: "5-5"}))
    rank, before = row(db, job_id).rank, history(db, job_id)
    removed = redrive(db, [job_id], actor="me")
    assert (removed.job_ids, removed.lanes, removed.entry_ids) == ([job_id], {"default"}, ["5-5"])
    job = row(db, job_id)
    assert (job.status, job.queued, job.attempt, job.attempts, job.crashes, job.redrives) == (
        *("pending", "ready", 2, 0, 0, 1),
    )
    assert (job.worker_id, job.lease_token, job.published_at, job.progress) == (None, None, None, None)
    assert (job.claimed_at, job.started_at, job.finished_at, job.rank) == (None, None, None, rank)
    assert job.last_error is not None  # what made it fail the last time
    event = db.read(lambda conn: audit.of_job(conn, job_id))[-1]
    assert history(db, job_id) == [*before, "job.redriven"]
    assert (event["actor"], event["attempt"], event["details"]) == ("me", 2, {"redrives": 1})
    assert letters(db) == {}
    # INV-3, INV-6: as many attempts as before, with numbers that go on growing.
    attempts = []
    for _ in range(2):
        (claim,) = hand.claim(job_id)
        attempts.append(claim.attempt)
        hand.fail(claim, retry_after_s=0.0)
    assert attempts == [3, 4]
    assert letters(db)[job_id].attempts == 2


def test_a_worker_of_an_earlier_life_changes_nothing(db):
    """INV-2."""
    hand = hire(db)
    (claim,) = hand.claim(*submit(db, max_attempts=1))
    hand.fail(claim)
    redrive(db, [claim.job_id])
    before = row(db, claim.job_id)
    assert [hand.finish(claim)[0].arrow, hand.fail(claim).arrow] == [None, None]
    assert row(db, claim.job_id) == before


def test_a_redriven_job_has_no_deadline_any_more(db):
    """The operator decided that it is worth running, though it is late."""
    (job_id,) = submit(db, deadline_at="2999-01-01T00:00:00Z", max_attempts=1)
    again(db, [job_id])
    set_job(db, job_id, deadline_at=utc_shift(-60.0))
    redrive(db, [job_id])
    assert row(db, job_id).expires_at is None
    assert hire(db).claim(job_id)


def test_a_redriven_job_may_be_cancelled_and_finished_like_any_other(db):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    db.write(lambda conn: cancel(conn, claim.job_id))
    hand.finish(claim)
    assert status(db, claim.job_id) == "cancelled"
    redrive_one(db, claim.job_id)
    (claim,) = hand.claim(claim.job_id)
    assert hand.finish(claim)[0].arrow is rules.FINISH


def test_a_job_is_redriven_only_so_often(db):
    (job_id,) = bury(db)
    for _ in range(2):
        assert redrive(db, [job_id], most=2).job_ids == [job_id]
        again(db, [job_id])
    before = row(db, job_id), history(db, job_id)
    assert redrive(db, [job_id], most=2).job_ids == []
    with pytest.raises(RedriveLimit, match="2 times"):
        redrive_one(db, job_id, most=2)
    assert (row(db, job_id), history(db, job_id)) == before
    assert (matching(db), matching(db, redrive_max=2)) == ([job_id], [])


def test_delays_follow_the_order_that_was_asked_for(db):
    ids = bury(db, 4)
    set_job(db, ids[3], attempt=9)  # another attempt: another statement
    assert redrive(db, ids[::-1], delay=lambda n: 10.0 * (n // 2)).job_ids == ids
    assert [row(db, job_id).queued for job_id in ids] == ["delayed", "delayed", "ready", "ready"]
    wait = row(db, ids[0]).not_before - now(db)
    assert timedelta(seconds=5) < wait <= timedelta(seconds=10)


def test_only_dead_letters_are_redriven_in_bulk(db):
    """BI-23."""
    (dead,), (waiting,) = bury(db), submit(db)
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    hand.fail(claim, ErrorKind.PERMANENT)
    before = row(db, waiting), row(db, claim.job_id)
    assert redrive(db, [waiting, claim.job_id, "nobody", dead]).job_ids == [dead]
    assert (row(db, waiting), row(db, claim.job_id)) == before
    assert redrive(db, []).job_ids == []


def test_a_bulk_redrive_whose_answer_was_lost_starts_nothing_else(db, lose_commits):
    ids = bury(db, 4)
    lose_commits(1)
    redrive(db, ids[:2])
    assert [status(db, job_id) for job_id in ids] == ["pending"] * 2 + ["dead_letter"] * 2
    assert all(history(db, job_id).count("job.redriven") == 1 for job_id in ids[:2])


@pytest.mark.parametrize("bulk", [True, False])
def test_concurrent_redrives_start_each_job_once(db, bulk):
    """F-51, INV-6."""
    ids = bury(db, 12)
    threads, barrier = 6, Barrier(6)

    def one(job_id):
        try:
            return redrive_one(db, job_id).job_ids
        except NotRedrivable:
            return []

    def race(n):
        barrier.wait(30)
        order = ids[::-1] if n % 2 else ids
        return redrive(db, order).job_ids if bulk else [done for job_id in order for done in one(job_id)]

    with ThreadPoolExecutor(threads) as pool:
        started = Counter(job_id for answer in pool.map(race, range(threads)) for job_id in answer)
    assert started == dict.fromkeys(ids, 1)
    for job_id in ids:
        assert history(db, job_id).count("job.redriven") == 1
        assert (row(db, job_id).redrives, status(db, job_id)) == (1, "pending")
    assert letters(db) == {}


# --- one job ---


@pytest.mark.parametrize("state", sorted(rules.REDRIVE.source))
def test_any_bad_end_of_one_job_may_be_redriven(db, state):
    (job_id,) = submit(db)
    set_job(db, job_id, status=state, attempt=4, attempts=3, crashes=1)
    removed = redrive_one(db, job_id, actor="me")
    assert (removed.job_ids, removed.lanes) == ([job_id], {"default"})
    job = row(db, job_id)
    assert (job.status, job.attempt, job.attempts, job.crashes, job.redrives) == ("pending", 4, 0, 0, 1)
    assert hire(db).claim(job_id)[0].attempt == 5


@pytest.mark.parametrize("state", ["pending", "claimed", "running", "done", "skipped"])
def test_any_other_job_is_not(db, state):
    (job_id,) = submit(db)
    set_job(db, job_id, status=state, redrives=1)
    before = row(db, job_id), history(db, job_id)
    for nth in (None, 2):
        with pytest.raises(NotRedrivable, match=state):
            redrive_one(db, job_id, nth=nth)
    assert (row(db, job_id), history(db, job_id)) == before


def test_a_job_that_nobody_knows_cannot_be_redriven(db):
    with pytest.raises(JobNotFound):
        redrive_one(db, "nobody")


def test_a_letter_leaves_with_its_job_and_names_its_entry(db):
    (job_id,) = bury(db)
    db.write(lambda conn: dead_letters.told(conn, dict.fromkeys(dead_letters.untold(conn, 1), "5-5")))
    assert redrive_one(db, job_id).entry_ids == ["5-5"]
    assert letters(db) == {}


def test_a_redrive_whose_answer_was_lost_is_no_refusal(db, lose_commits):
    (job_id,) = bury(db)
    lose_commits(1)
    assert redrive_one(db, job_id, nth=1).job_ids == [job_id]
    assert (row(db, job_id).redrives, history(db, job_id).count("job.redriven")) == (1, 1)


# --- purge ---


def test_what_is_purged_is_gone_and_the_audit_trail_knows(db):
    ids = bury(db, 3)
    (first,) = [item for item in untold(db) if item.letter.job_id == ids[0]]
    db.write(lambda conn: dead_letters.told(conn, {first: "5-5"}))
    removed = purge(db, ids[:2], actor="me")
    assert (removed.job_ids, removed.entry_ids) == (ids[:2], ["5-5"])
    assert [job.job_id for job in rows(db, schema.jobs)] == ids[2:] == list(letters(db))
    event = db.read(lambda conn: audit.of_job(conn, ids[0]))[-1]
    assert (event["event_type"], event["actor"], event["pool_id"]) == ("job.purged", "me", "default")
    assert history(db, ids[0]) == ["job.submitted", "job.claimed", "job.dead_letter", "job.purged"]
    assert purge(db, ids[:2]).job_ids == []


def test_only_dead_letters_are_purged(db):
    """BI-23."""
    (dead,), (waiting,) = bury(db), submit(db)
    assert purge(db, [waiting, "nobody", dead]).job_ids == [dead]
    assert status(db, waiting) == "pending"
    assert purge(db, []).job_ids == []


def test_a_job_that_was_redriven_first_is_not_purged(db):
    """Even if its letter were still there: the row decides."""
    (job_id,) = bury(db)
    set_job(db, job_id, status="pending")
    assert purge(db, [job_id]).job_ids == []
    assert status(db, job_id) == "pending" and job_id in letters(db)


def test_redrive_races_purge_and_one_of_them_wins(maria_db):
    ids, barrier = bury(maria_db, 20), Barrier(2)

    def race(work):
        barrier.wait(30)
        return {job_id for n in range(0, 20, 5) for job_id in work(maria_db, ids[n : n + 5]).job_ids}

    with ThreadPoolExecutor(2) as pool:
        redriven, purged = pool.map(race, (redrive, purge))
    assert redriven.isdisjoint(purged) and redriven | purged == set(ids)
    assert {job.job_id for job in rows(maria_db, schema.jobs) if job.status == "pending"} == redriven
    assert purged.isdisjoint(job.job_id for job in rows(maria_db, schema.jobs))
    assert letters(maria_db) == {}


def test_a_purged_id_may_be_submitted_and_leased_again(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, job_id="j", max_attempts=1, min_memory_mb=100))
    hand.fail(claim)
    assert purge(db, ["j"]).job_ids == ["j"]
    assert rows(db, schema.leases) == rows(db, schema.lease_gpus) == []
    assert submit_jobs(db, [new_job(job_id="j", payload={"other": 1}, min_memory_mb=100)], POLICY) == [Verdict.CREATED]
    (claim,) = hand.claim("j")
    assert claim.attempt == 1 and claim.lease is not None


def test_a_job_whose_worker_vanished_is_purged_once_its_lease_is_over(db):
    """Its process may still run, under a lease of the name that the same id would get again."""
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, max_attempts=1, min_memory_mb=100))
    hand.lose()
    assert purge(db, [claim.job_id]).job_ids == []
    assert len(active_leases(db)) == 1 and claim.job_id in letters(db)
    db.write(lambda conn: conn.execute(update(schema.leases).values(expires_at=utc_shift(-1.0))))
    db.write(lease_purge.purge)
    hire(db, gpu())  # who sees that no process is left
    assert purge(db, [claim.job_id]).job_ids == [claim.job_id]
    assert rows(db, schema.leases) == []


# --- looking ---


@pytest.fixture
def crowd(db):
    """Letters that differ in what filters look at, oldest first."""
    hand = hire(db)
    return [
        *bury(db, hand=hand, type="echo", agent="ann"),
        *bury(db, hand=hand, type="echo", agent="bob", kind=ErrorKind.TIMEOUT),
        *bury(db, hand=hand, type="embed", agent="ann", kind=ErrorKind.TIMEOUT),
        *bury(db, hand=hand, type="embed", agent="ann", pool_id="gold"),
    ]


def test_filters(db, crowd):
    for wanted, found in (
        (Filter(), [0, 1, 2, 3]),
        (Filter(type="echo"), [0, 1]),
        (Filter(agent="ann"), [0, 2, 3]),
        (Filter(pool_id="gold"), [3]),
        (Filter(reason="timeout"), [1, 2]),
        (Filter(type="embed", agent="ann", reason="timeout", pool_id="default"), [2]),
        (Filter(type="Echo"), []),
    ):
        expected = [crowd[n] for n in found]
        assert matching(db, wanted) == expected, wanted
        assert db.read(lambda conn, w=wanted: dead_letters.count(conn, w)) == (len(expected), False), wanted
        shown, following = db.read(lambda conn, w=wanted: dead_letters.page(conn, w, 10, None))
        assert ([letter["job_id"] for letter in shown], following) == (expected[::-1], None), wanted


def test_ids_are_a_filter_like_the_others(db, crowd):
    wanted = Filter(job_ids=(crowd[2], "nobody", crowd[0]))
    assert matching(db, wanted) == [crowd[0], crowd[2]]
    assert matching(db, dataclasses.replace(wanted, reason="timeout")) == [crowd[2]]


def test_the_oldest_are_meant_first(db, crowd):
    assert matching(db, limit=2) == crowd[:2]


def test_a_page_says_what_one_wants_to_know(db, crowd):
    shown, _ = db.read(lambda conn: dead_letters.page(conn, Filter(), 1, None))
    (letter,) = shown
    assert letter.pop("buried_at") <= now(db)
    assert letter == {
        "job_id": crowd[3],
        "type": "embed",
        "agent": "ann",
        "pool_id": "gold",
        "reason": "transient",
        "attempts": 1,
        "redrives": 0,
        "origin_id": "7-1",
        "last_error": "it broke",
    }


@pytest.mark.parametrize("same_moment", [True, False])
def test_pages_show_every_letter_once(db, same_moment):
    ids = bury(db, 10)
    if same_moment:
        moment = now(db)
        db.write(lambda conn: conn.execute(update(schema.dead_letters).values(buried_at=moment)))
    seen, cursor = [], None
    while True:
        shown, cursor = db.read(lambda conn, at=cursor: dead_letters.page(conn, Filter(), 3, at))
        seen += [letter["job_id"] for letter in shown]
        if cursor is None:
            break
        redrive(db, [seen[0]])  # what leaves meanwhile moves no other letter to another page
    assert sorted(seen) == sorted(ids) and len(set(seen)) == 10


@pytest.mark.parametrize("cursor", ["", "x", "💥", "AAAA", "bm93IGpvYg==", "MjAzMC0wMS0wMQ=="])
def test_a_cursor_of_somebody_else_is_refused(db, cursor):
    """BI-16."""
    with pytest.raises(InvalidInput, match="cursor"):
        db.read(lambda conn: dead_letters.page(conn, Filter(), 10, cursor))


# --- windows ---


def pages(db, ask):
    cursor = None
    while True:
        found, cursor = db.read(lambda conn, at=cursor: ask(conn, at))
        yield found
        if cursor is None:
            return


def test_windows_of_letters_leave_none_out_and_show_none_twice(db, monkeypatch):
    """Those of one moment, too. One in five is meant: some pages are empty, and only the last has no cursor."""
    monkeypatch.setattr(paging, "WINDOW", 4)
    many_jobs(db, 23, status="dead_letter", queued=None, agent=lambda i: "rare" if i % 5 == 2 else "usual")
    buried = [{"job_id": f"many-{i:06}", "reason": "timeout", "attempts": 3} for i in range(23)]
    db.write(lambda conn: conn.execute(insert(schema.dead_letters), buried))
    meant = [f"many-{i:06}" for i in range(2, 23, 5)]
    wanted = Filter(agent="rare")
    shown = list(pages(db, lambda conn, at: dead_letters.page(conn, wanted, 3, at)))
    assert [letter["job_id"] for page in shown for letter in page] == meant[::-1]
    assert len(shown) == 6 and [] in shown
    oldest = pages(db, lambda conn, at: dead_letters.look(conn, wanted, at))
    assert [one.job_id for page in oldest for one in page] == meant
    by_status = failures.Filter(agent="rare")
    started = pages(db, lambda conn, at: failures.look(conn, by_status, Status.DEAD_LETTER, at))
    assert [one.job_id for page in started for one in page] == meant


def test_a_count_looks_at_the_latest_and_says_so(db):
    many_jobs(db, 9, status="dead_letter", queued=None, agent=lambda i: "rare" if i in (0, 8) else "usual")
    buried = [{"job_id": f"many-{i:06}", "reason": "timeout", "attempts": 3} for i in range(9)]
    db.write(lambda conn: conn.execute(insert(schema.dead_letters), buried))
    rare = Filter(agent="rare")
    for wanted, most, found in (
        (Filter(), 8, (8, True)),
        (Filter(), 9, (9, False)),
        (rare, 8, (1, True)),
        (rare, 9, (2, False)),
        (Filter(("many-000000",)), 8, (1, False)),
    ):
        assert db.read(lambda conn, w=wanted, n=most: dead_letters.count(conn, w, n)) == found, (wanted, most)
