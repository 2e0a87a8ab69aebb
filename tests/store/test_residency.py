"""Warm models: a lease that outlives its job, serves the next one, and makes room for others."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread
from typing import Any

import pytest
from sqlalchemy import text, update

from orchestrator.gpu import GpuProcess
from orchestrator.jobs import ErrorKind
from orchestrator.leases import Denied, Granted, LeaseRequest, LeaseState, Remains, ResidentSlot, Terms, job_lease_key
from orchestrator.placement import Policy
from orchestrator.store import dead_letters, grants, leases, residency, schema
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.claim_leases import NO_BLANK_SLOT
from orchestrator.store.dialect import utc_shift
from orchestrator.store.residency import Model
from orchestrator.store.settle import Left, Release, end_leases
from tests.factories import STALE_S, done, failed, gpu, hire, history, now, row, rows, set_job, status, submit
from tests.waiting import wait_until


def terms() -> Terms:
    return Terms(STALE_S, Policy.BEST_FIT, resident_min_s=30.0)


def leased(db):
    return sum(row.leased_mb for row in rows(db, schema.gpus))


def lease_of(db, key):
    (found,) = [lease for lease in rows(db, schema.leases) if lease.token == key]
    return found


def change(db, key, **values):
    """Write columns of a lease behind the back of all guards."""
    mine = update(schema.leases).where(schema.leases.c.token == key).values(**values)
    db.write(lambda conn: conn.execute(mine))


def left(hand, slot=1, key="model:w#1:1", type="echo", model_id="m", pinned=False):
    return Left(Remains.MODEL, f"{hand.worker_id}#{slot}", key, type, model_id, pinned)


def settle_in(hand, slot=1, memory_mb=5000, gpu_count=1, model_id="m", pinned=False, idle_s=100.0, resident_s=1000.0):
    """A job ran and left its model in memory."""
    db = hand.db
    (claim,) = hand.claim(*submit(db, min_memory_mb=memory_mb, gpu_count=gpu_count, model_id=model_id))
    key = f"model:{hand.worker_id}#{slot}:{slot}"
    hand.record(ends=[done(claim)._replace(left=left(hand, slot, key, "echo", model_id, pinned))])
    change(db, key, idle_since=utc_shift(-idle_s), created_at=utc_shift(-resident_s))
    return ResidentSlot(key, "echo", model_id, memory_mb, claim.lease.gpus)


def job(db, memory_mb=5000, model_id="m", **fields):
    (job_id,) = submit(db, min_memory_mb=memory_mb, model_id=model_id, **fields)
    return job_id


def ask(db, memory_mb, on=None, **fields):
    request = LeaseRequest(**({"agent": "a", "memory_mb": memory_mb, "ttl_s": 60.0} | fields))
    (answer,) = db.write(lambda conn: grants.grant(conn, [request], on or terms()))
    return answer


def offer(hand, job_id, **fields):
    return hand.offer(job_id, **fields)[job_id]


def under(claim):
    """The lease of a claim."""
    assert isinstance(claim, Claim), claim
    assert claim.lease is not None
    return claim.lease


def evicted(db):
    return sorted(lease.token for lease in rows(db, schema.leases) if lease.evicted_at)


# --- keeping ---


def test_a_job_that_keeps_its_model_leaves_its_lease_under_a_name_of_its_own(db):
    hand = hire(db, gpu(0), gpu(1))
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000, gpu_count=2, model_id="m"))
    hand.record(ends=[done(claim)._replace(left=left(hand, 3, "model:new", pinned=True))])
    assert status(db, claim.job_id) == "done"
    (lease,) = rows(db, schema.leases)
    assert (lease.token, lease.state, lease.resident, lease.job_id) == ("model:new", "active", True, None)
    assert (lease.slot, lease.job_type, lease.model_id, lease.pinned) == (f"{hand.worker_id}#3", "echo", "m", True)
    assert lease.idle_since <= now(db)
    assert {(share.token, share.memory_mb) for share in rows(db, schema.lease_gpus)} == {("model:new", 1000)}
    assert leased(db) == 2000
    hand.beat(resident=("model:new",))
    assert lease_of(db, "model:new").expires_at > now(db)


@pytest.mark.parametrize("how", ["ended", "ending"])
def test_a_lease_that_is_over_keeps_no_model(db, how):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    end = leases.free if how == "ended" else leases.let_go
    db.write(lambda conn: end(conn, [claim.lease.key], LeaseState.SPENT))
    assert db.write(lambda conn: residency.keep(conn, claim.lease.key, Model("model:x", "w#1", "echo"))) is False
    (lease,) = rows(db, schema.leases)
    assert (lease.token, lease.resident) == (claim.lease.key, False)
    assert {share.token for share in rows(db, schema.lease_gpus)} == {claim.lease.key}


def test_keeping_again_under_the_same_name(db):
    hand = hire(db, gpu())
    slot = settle_in(hand)
    change(db, slot.key, idle_since=None)
    again = Model(slot.key, "w#1", "echo", "m")
    assert db.write(lambda conn: residency.keep(conn, slot.key, again)) is True
    assert lease_of(db, slot.key).idle_since is not None
    assert [share.token for share in rows(db, schema.lease_gpus)] == [slot.key]


def test_keeping_whose_answer_was_lost_is_kept_once(db, lose_commits):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    lose_commits(1)
    hand.record(ends=[done(claim)._replace(left=left(hand, key="model:new"))])
    assert [(lease.token, lease.state) for lease in rows(db, schema.leases)] == [("model:new", "active")]
    assert leased(db) == 1000
    assert history(db, claim.job_id).count("job.done") == 1


def test_an_attempt_that_lost_its_job_keeps_its_model_all_the_same(db, lose_commits):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    db.write(lambda conn: conn.execute(update(schema.jobs).values(worker_id="other", attempt=2, lease_token=None)))
    lose_commits(1)
    (settled,) = hand.record(ends=[done(claim)._replace(left=left(hand, key="model:new"))])
    assert settled.arrow is None
    assert [(lease.token, lease.resident) for lease in rows(db, schema.leases)] == [("model:new", True)]


def test_a_job_id_that_was_purged_and_submitted_again_does_not_meet_the_lease_of_its_model(db):
    hand = hire(db, gpu())
    submit(db, job_id="again", min_memory_mb=1000, max_attempts=1)
    (claim,) = hand.claim("again")
    hand.record(ends=[failed(claim, ErrorKind.TIMEOUT)._replace(left=left(hand, key="model:new"))])
    assert status(db, "again") == "dead_letter"
    assert db.write(lambda conn: dead_letters.purge(conn, ["again"])).job_ids == ["again"]
    submit(db, job_id="again", min_memory_mb=1000)
    (claim,) = hand.claim("again")
    assert (claim.attempt, claim.lease.key) == (1, job_lease_key("again", 1))
    assert leased(db) == 2000


# --- occupying ---


def test_the_next_job_of_the_model_runs_under_its_lease(db):
    hand = hire(db, gpu())
    slot = settle_in(hand)
    job_id = job(db)
    answer = offer(hand, job_id, warm=[slot], blank=0)
    assert isinstance(answer, Claim)
    assert (under(answer).key, under(answer).resident, under(answer).gpus) == (slot.key, slot.key, slot.gpus)
    assert row(db, job_id).lease_token == slot.key
    assert (lease_of(db, slot.key).job_id, lease_of(db, slot.key).idle_since) == (job_id, None)
    assert leased(db) == 5000
    hand.record(ends=[done(answer)._replace(left=left(hand, key=slot.key))])
    kept = lease_of(db, slot.key)
    assert (kept.state, kept.job_id, kept.idle_since is None) == ("active", None, False)
    assert leased(db) == 5000


@pytest.mark.parametrize(
    ("wish", "offered"),
    [
        ({"model_id": "other"}, {}),
        ({"type": "sleep"}, {}),
        ({"memory_mb": 5001}, {}),
        ({"gpu_count": 2}, {}),
        ({}, {"type": "sleep"}),
    ],
)
def test_a_job_that_needs_something_else_does_not_run_there(db, wish, offered):
    hand = hire(db, gpu(0), gpu(1))
    slot = settle_in(hand)
    job_id = job(db, **wish)
    answer = offer(hand, job_id, warm=[_with(slot, offered)])
    assert isinstance(answer, Claim)
    assert under(answer).resident is None
    assert lease_of(db, slot.key).job_id is None


def _with(slot, fields):
    return ResidentSlot(**(slot.__dict__ | fields))


def test_a_smaller_job_runs_there_too(db):
    hand = hire(db, gpu())
    slot = settle_in(hand)
    job_id = job(db, 100)
    assert offer(hand, job_id, warm=[slot]).lease.resident == slot.key


def test_one_model_serves_one_job_at_a_time(db):
    hand = hire(db, gpu())
    slots = [settle_in(hand, 1), settle_in(hand, 2)]
    ids = [job(db) for _ in range(3)]
    answers = hand.offer(*ids, warm=slots)
    used = [under(answers[job_id]).resident for job_id in ids]
    assert sorted(used, key=str) == sorted([None, slots[0].key, slots[1].key], key=str)
    assert leased(db) == 15_000


@pytest.mark.parametrize("why", ["evicted", "ending", "over", "expired", "busy", "another's"])
def test_a_lease_that_is_of_no_use_any_more_is_not_occupied(db, why):
    hand = hire(db, gpu())
    slot = settle_in(hand)
    values: Any = {
        "evicted": {"evicted_at": utc_shift(0.0)},
        "ending": {"ending_as": "spent", "ending_since": utc_shift(0.0)},
        "over": {"state": "spent"},
        "expired": {"expires_at": utc_shift(-1.0)},
        "busy": {"job_id": "other"},
        "another's": {"worker_id": "somebody"},
    }[why]
    change(db, slot.key, **values)
    before = lease_of(db, slot.key)
    job_id = job(db)
    answer = offer(hand, job_id, warm=[slot])
    assert under(answer).resident is None  # it got a lease of its own
    assert lease_of(db, slot.key) == before


def test_when_one_warm_slot_was_asked_to_leave_another_serves(db):
    hand = hire(db, gpu())
    gone, there = settle_in(hand, 1), settle_in(hand, 2)
    change(db, gone.key, evicted_at=utc_shift(0.0))
    job_id = job(db)
    assert offer(hand, job_id, warm=[gone, there], blank=0).lease.resident == there.key


def test_a_claim_under_a_warm_model_whose_answer_was_lost_is_made_anew_under_it(db, lose_commits):
    hand = hire(db, gpu())
    slot = settle_in(hand)
    job_id = job(db)
    lose_commits(1)
    answer = offer(hand, job_id, warm=[slot], blank=0)
    assert isinstance(answer, Claim), answer
    assert (answer.attempt, under(answer).resident) == (2, slot.key)
    lease = lease_of(db, slot.key)
    assert (lease.state, lease.job_id) == ("active", job_id)
    assert leased(db) == 5000
    assert history(db, job_id) == ["job.submitted", "job.claimed", "job.handed_back", "job.claimed"]


def test_a_stray_under_a_warm_model_and_one_under_its_own_lease_are_both_handed_back(db):
    hand = hire(db, gpu())
    slot = settle_in(hand)
    warm, cold = job(db), job(db, 100, "other")
    assert all(isinstance(one, Claim) for one in hand.offer(warm, cold, warm=[slot]).values())
    assert leased(db) == 5100
    answers = hand.offer(warm, cold, warm=[])  # it knows of neither, nor of the model
    assert [under(answers[job_id]).resident for job_id in (warm, cold)] == [None, None]
    lease = lease_of(db, slot.key)
    assert (lease.state, lease.job_id, lease.idle_since is None) == ("active", None, False)
    assert leased(db) == 10_100


# --- slots without a model ---


def test_a_job_that_needs_a_process_of_its_own_waits_when_all_free_ones_keep_models(db):
    hand = hire(db, gpu())
    slot = settle_in(hand)
    job_id = job(db, 100, "other")
    answer = offer(hand, job_id, warm=[slot], blank=0)
    assert answer == NotClaimed(NO_BLANK_SLOT, evicting=True)
    waiting = row(db, job_id)
    assert (waiting.status, waiting.wait_reason, waiting.attempts) == ("pending", NO_BLANK_SLOT, 0)
    assert (waiting.not_before - now(db)).total_seconds() < 0.5
    assert leased(db) == 5000
    assert evicted(db) == []  # the worker knows itself which of its slots is to leave


def test_as_many_new_leases_as_there_are_blank_slots(db):
    hand = hire(db, gpu())
    ids = [job(db, 100) for _ in range(3)]
    answers = hand.offer(*ids, blank=2)
    assert [isinstance(answers[job_id], Claim) for job_id in ids] == [True, True, False]
    assert answers[ids[2]] == NotClaimed(NO_BLANK_SLOT, evicting=True)
    assert leased(db) == 200


def test_jobs_without_leases_need_no_blank_slot(db):
    hand = hire(db)
    (job_id,) = submit(db)
    assert isinstance(offer(hand, job_id, blank=0), Claim)


# --- making room ---


def test_the_least_recently_used_of_the_idle_makes_room(db):
    hand = hire(db, gpu(total_mb=20_000))  # 18,000 usable
    old, young = settle_in(hand, 1, idle_s=90.0), settle_in(hand, 2, idle_s=10.0)
    answer = ask(db, 10_000)
    assert isinstance(answer, Denied)
    assert answer.evicting
    assert answer.retry_after_s == grants.ROOM_IS_MADE_S
    assert answer.reason.endswith("8000 of 18000 MB free; 1 idle warm models make room")
    assert evicted(db) == [old.key]
    assert hand.beat(resident=(old.key, young.key)).evicted == (old.key,)
    assert lease_of(db, young.key).evicted_at is None
    db.write(lambda conn: end_leases(conn, [Release(old.key, Left())]))
    assert hand.beat(resident=(young.key,)).evicted == ()
    assert isinstance(ask(db, 10_000), Granted)
    assert evicted(db) == [old.key]


def test_as_many_leave_as_are_needed_and_none_in_vain(db):
    hand = hire(db, gpu(total_mb=20_000))
    slots = [settle_in(hand, n, idle_s=100.0 - n) for n in (1, 2, 3)]
    assert ask(db, 18_001).evicting is False
    assert evicted(db) == []
    assert ask(db, 13_000).evicting
    assert evicted(db) == sorted(slot.key for slot in slots[:2])


@pytest.mark.parametrize("why", ["pinned", "young", "busy", "ending", "elsewhere", "cpu"])
def test_those_stay_that_may(db, why):
    hand = hire(db, gpu(total_mb=20_000))
    slot = settle_in(hand, memory_mb=15_000, pinned=why == "pinned", resident_s=10.0 if why == "young" else 31.0)
    if why == "busy":
        assert isinstance(offer(hand, job(db, 15_000), warm=[slot]), Claim)
    if why == "ending":
        db.write(lambda conn: leases.let_go(conn, [slot.key], LeaseState.SPENT))
    answer = ask(db, 10_000, node_id="elsewhere" if why == "elsewhere" else None, cpu_fallback=why == "cpu")
    assert answer.mode == "cpu" if why == "cpu" else not answer.evicting
    assert evicted(db) == []


def test_the_min_residency_is_a_setting(db):
    hand = hire(db, gpu(total_mb=20_000))
    settle_in(hand, memory_mb=15_000, resident_s=29.0)
    assert ask(db, 10_000, Terms(STALE_S, resident_min_s=20.0)).evicting


def test_a_row_that_somebody_edited_stands_in_nobodys_way(db):
    hand = hire(db, gpu(total_mb=20_000))
    slot = settle_in(hand, memory_mb=15_000)
    change(db, slot.key, idle_since=None)
    assert ask(db, 10_000).evicting


def test_the_same_models_are_not_counted_for_two_of_a_batch(db):
    hand = hire(db, gpu(total_mb=20_000))
    settle_in(hand, memory_mb=15_000)
    wishes = [LeaseRequest("a", 10_000, 60.0) for _ in range(2)]
    answers = db.write(lambda conn: grants.grant(conn, wishes, terms()))
    assert [answer.evicting for answer in answers] == [True, False]


def test_each_of_a_batch_gets_models_of_its_own_to_make_room(db):
    hand = hire(db, gpu(0, total_mb=20_000), gpu(1, total_mb=20_000))
    slots = [settle_in(hand, n, memory_mb=15_000) for n in (1, 2)]
    wishes = [LeaseRequest("a", 10_000, 60.0) for _ in range(2)]
    answers = db.write(lambda conn: grants.grant(conn, wishes, terms()))
    assert [isinstance(answer, Denied) and answer.evicting for answer in answers] == [True, True]
    assert evicted(db) == sorted(slot.key for slot in slots)


def test_a_clients_lease_makes_room_for_nobody(db):
    hire(db, gpu(total_mb=20_000))
    client = ask(db, 15_000)
    change(db, client.key, created_at=utc_shift(-1000.0), idle_since=utc_shift(-100.0))
    assert ask(db, 10_000).evicting is False
    assert evicted(db) == []


def test_a_job_that_finds_no_room_makes_some(db):
    hand = hire(db, gpu(total_mb=20_000))
    slot = settle_in(hand, memory_mb=15_000)
    job_id = job(db, 10_000, "other")
    set_job(db, job_id, created_at=utc_shift(-50.0))  # without room to be made it would wait for five seconds
    answer = offer(hand, job_id)
    assert isinstance(answer, NotClaimed) and answer.evicting
    assert evicted(db) == [slot.key]
    assert (row(db, job_id).not_before - now(db)).total_seconds() < 0.5


def test_a_job_asks_only_models_of_its_own_node_to_leave(db):
    near, far = hire(db, gpu(0, total_mb=20_000), node="near"), hire(db, gpu(1, total_mb=20_000), node="far")
    settle_in(far, 1, memory_mb=15_000)
    near.claim(job(db, 15_000))
    job_id = job(db, 10_000, "other")
    assert offer(near, job_id).evicting is False
    assert evicted(db) == []


def test_a_worker_hears_of_its_own_models_only_and_not_of_those_that_leave(db):
    one, other = hire(db, gpu(0)), hire(db)
    slots = [settle_in(one, 1), settle_in(one, 2), settle_in(other, 1)]
    for slot in slots:
        change(db, slot.key, evicted_at=utc_shift(0.0))
    assert sorted(one.beat(resident=tuple(slot.key for slot in slots[:2])).evicted) == [slots[0].key, slots[1].key]
    db.write(lambda conn: leases.let_go(conn, [slots[0].key], LeaseState.SPENT))
    leaving = (GpuProcess(7, 5000, mark=f"{one.worker_id}#1"),)
    kept = tuple(slot.key for slot in slots[:2])
    assert one.sees(gpu(used_mb=5000, processes=leaving), resident=kept).evicted == (slots[1].key,)
    assert lease_of(db, slots[0].key).state == "active"
    assert other.beat(resident=(slots[2].key,)).evicted == (slots[2].key,)


def test_a_warm_model_makes_its_node_the_first_choice(db):
    hire(db, gpu(0, total_mb=10_000), node="a")
    warm = hire(db, gpu(1, total_mb=90_000), node="b")
    hire(db, gpu(2, total_mb=10_000), node="c")
    assert ask(db, 1000, model_id="m").node_id != "b"  # best fit
    settle_in(warm)
    assert ask(db, 1000, model_id="m").node_id == "b"
    assert ask(db, 1000, model_id="other").node_id != "b"
    assert ask(db, 1000, model_id="m", node_id="c").node_id == "c"


# --- races ---


def waits_for_a_lock(db):
    waiting = text("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
    return db.read(lambda conn: int(conn.execute(waiting).one()[1]))


def test_who_occupies_while_another_evicts_sees_it(maria_db):
    db = maria_db
    hand = hire(db, gpu(total_mb=20_000))
    slot = settle_in(hand, memory_mb=15_000)
    answers = []
    with db.engine.begin() as evictor:
        (denied,) = grants.grant(evictor, [LeaseRequest("a", 10_000, 60.0)], terms())
        assert isinstance(denied, Denied) and denied.evicting
        occupier = Thread(
            target=lambda: answers.append(db.write(lambda conn: residency.occupy(conn, slot, "j", hand.worker_id))),
            name="occupier",
        )
        occupier.start()
        wait_until(lambda: waits_for_a_lock(db), what="it waits for the evictor")
    occupier.join(60)
    assert answers == [False]
    assert (lease_of(db, slot.key).job_id, evicted(db)) == (None, [slot.key])


def test_who_evicts_while_another_occupies_does_not_wait_and_takes_nothing(maria_db):
    db = maria_db
    hand = hire(db, gpu(total_mb=20_000))
    slot = settle_in(hand, memory_mb=15_000)
    with db.engine.begin() as occupier:
        assert residency.occupy(occupier, slot, "j", hand.worker_id)
        answer = ask(db, 10_000)  # on a connection of its own
        assert answer.evicting is False
    assert (lease_of(db, slot.key).job_id, evicted(db)) == ("j", [])


def test_a_model_is_never_occupied_and_evicted(db):
    """Two threads at once, again and again: either, or none, never both."""
    hand = hire(db, gpu(total_mb=20_000))
    seen = set()
    for n in range(12):
        slot = settle_in(hand, n, memory_mb=15_000)
        job_id = job(db, 15_000)
        together = Barrier(2)

        def occupy(slot=slot, job_id=job_id, together=together):
            together.wait(20)
            return offer(hand, job_id, warm=[slot], blank=0)

        def evict(together=together):
            together.wait(20)
            return ask(db, 10_000)

        with ThreadPoolExecutor(2) as pool:
            claimed, denied = pool.submit(occupy), pool.submit(evict)
            won = (isinstance(claimed.result(30), Claim), denied.result(30).evicting)
        lease = lease_of(db, slot.key)
        assert won in {(True, False), (False, True), (False, False)}
        assert won == (lease.job_id == job_id, lease.evicted_at is not None)
        seen.add(won)
        db.write(lambda conn, key=slot.key: leases.free(conn, [key]))
        assert leased(db) == 0
    assert seen & {(True, False), (False, True)}
