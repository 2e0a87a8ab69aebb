"""Leases: granted by a guarded UPDATE, kept alive by heartbeats, never brought back to life."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from orchestrator.errors import LeaseEnded, LeaseNotFound
from orchestrator.gpu import GpuProcess, Health
from orchestrator.leases import Denied, Granted, LeaseRequest, Terms, lease_name, token_hash
from orchestrator.placement import Policy, Reason
from orchestrator.store import gpus, grants, inventory, lease_purge, lease_reads, leases, paging, schema
from orchestrator.store.dialect import by_key, utc_now, utc_shift
from orchestrator.store.gpus import Gate
from tests.factories import STALE_S, active_leases, gpu, heartbeat, hire, is_sqlite, now, rows, submit


def request(memory_mb=1000, **fields):
    return LeaseRequest(**({"agent": "a", "memory_mb": memory_mb, "ttl_s": 60.0} | fields))


def grant(db, *requests, stale_s=STALE_S):
    return db.write(lambda conn: grants.grant(conn, requests, Terms(stale_s, Policy.BEST_FIT)))


def test_pages_show_every_live_lease_once_oldest_first_and_no_secret(db):
    hire(db, gpu(total_mb=24_000))
    hand = hire(db)
    granted = [*grant(db, *(request(100) for _ in range(4))), *grant(db, *(request(100) for _ in range(3)))]
    granted += [claim.lease for claim in hand.claim(*submit(db, 3, min_memory_mb=100))]
    db.write(lambda conn: leases.free(conn, [granted[2].key]))
    live = [lease for lease in granted if lease is not granted[2]]
    seen: list[Any] = []
    cursor = None
    while not seen or cursor is not None:
        found, cursor = db.read(lambda conn, at=cursor: lease_reads.page(conn, 2, at))
        assert 1 <= len(found) <= 2 and all("token" not in lease for lease in found)
        assert not any(lease.key in paging.decode(cursor)[1] for lease in live[:6] if cursor)  # those of jobs are names
        seen += found
    assert sorted(lease["lease"] for lease in seen) == sorted(lease_name(lease.key) for lease in live)
    moments = [lease["created_at"] for lease in seen]
    assert moments == sorted(moments)


def leased(db):
    return [g.leased_mb for g in sorted(rows(db, schema.gpus), key=lambda g: g.gpu_index)]


def expire_job_lease(db, claim):
    mine = schema.leases.c.token == claim.lease.key
    db.write(lambda conn: conn.execute(update(schema.leases).where(mine).values(expires_at=utc_shift(-1.0))))


def expire(db, token, seconds=1.0):
    """As if the lease had run out that long ago."""
    mine = schema.leases.c.token == token_hash(token)
    db.write(lambda conn: conn.execute(update(schema.leases).where(mine).values(expires_at=utc_shift(-seconds))))


def release(db, token):
    return db.write(lambda conn: leases.release(conn, token))


def test_a_granted_lease_is_memory_taken(db):
    hire(db, gpu(0), gpu(1))
    before, began = now(db), time.monotonic()
    (answer,) = grant(db, request(1000, gpu_count=2))
    assert isinstance(answer, Granted)
    assert (answer.mode, answer.node_id) == ("gpu", "node-1")
    assert [(share.gpu_uuid, share.gpu_index) for share in answer.gpus] == [("GPU-0", 0), ("GPU-1", 1)]
    assert leased(db) == [1000, 1000]
    # The database's time or a little later, by as much as it took to ask for that: never earlier.
    late = timedelta(seconds=time.monotonic() - began)
    assert before <= answer.expires_at - timedelta(seconds=60) <= now(db) + late
    (lease,) = rows(db, schema.leases)
    assert (lease.memory_mb, lease.state, lease.expires_at) == (1000, "active", answer.expires_at)
    assert sorted(share.gpu_uuid for share in rows(db, schema.lease_gpus)) == ["GPU-0", "GPU-1"]


def test_a_batch_sees_what_its_own_members_took(db):
    hire(db, gpu(0, total_mb=10_000), gpu(1, total_mb=10_000))  # 9000 usable each
    answers = grant(db, *[request(4000) for _ in range(5)])
    assert [isinstance(answer, Granted) for answer in answers] == [True] * 4 + [False]
    assert answers[4].reason == "needs 4000 MB; node-1/0: 1000 of 9000 MB free, node-1/1: 1000 of 9000 MB free"
    assert answers[4].retry_after_s > 0
    assert leased(db) == [8000, 8000]


def test_the_last_megabyte_may_be_leased_and_not_one_more(db):
    hire(db, gpu(total_mb=10_000, foreign_mb=3000))
    assert isinstance(grant(db, request(6001))[0], Denied)
    assert isinstance(grant(db, request(6000))[0], Granted)
    assert isinstance(grant(db, request(1))[0], Denied)


def test_several_gpus_are_all_or_nothing_and_of_one_node(db):
    hire(db, gpu(0), gpu(1, health="lost"), node="one")
    hire(db, gpu(2), node="two")
    (answer,) = grant(db, request(1000, gpu_count=2))
    assert isinstance(answer, Denied)
    assert leased(db) == [0, 0, 0]


def test_a_wish_for_a_node_is_kept(db):
    hire(db, gpu(0), node="one")
    hire(db, gpu(1, total_mb=90_000), node="two")
    (answer,) = grant(db, request(1000, node_id="two"))
    assert answer.node_id == "two"


def test_cpu_when_allowed_and_only_when_no_gpu_has_room(db):
    hire(db, gpu(total_mb=10_000))
    first, second = grant(db, *[request(6000, cpu_fallback=True) for _ in range(2)])
    assert (first.mode, second.mode) == ("gpu", "cpu")
    assert second.gpus == ()
    assert leased(db) == [6000]
    assert release(db, second.request.token) == "active"
    assert leased(db) == [6000]


@pytest.mark.parametrize("health", sorted({*Health} - {Health.OK}))
def test_a_gpu_that_is_not_well_closes_the_gate_from_its_first_sample_on(db, health):
    """INV-15."""
    hand = hire(db, gpu(health=health, health_reason="XID 79"))
    (answer,) = grant(db, request())
    assert isinstance(answer, Denied)
    assert health in answer.reason
    assert rows(db, schema.gpus)[0].health_reason == "XID 79"
    hand.gpus = [gpu()]
    hand.beat()
    assert isinstance(grant(db, request())[0], Granted)
    hand.gpus = [gpu(health=health)]
    hand.beat()
    assert isinstance(grant(db, request())[0], Denied)


def test_a_stale_sample_closes_the_gate(db):
    hand = hire(db, gpu())
    old = update(schema.gpus).values(sampled_at=utc_shift(-STALE_S - 1))
    db.write(lambda conn: conn.execute(old))
    (answer,) = grant(db, request())
    assert (answer.code, answer.reason) == (Reason.STALE, "needs 1000 MB; node-1/0: its last sample is stale")
    hand.beat()
    assert isinstance(grant(db, request())[0], Granted)


@pytest.mark.parametrize("change", ["health", "stale", "full", "foreign", "quarantine", "gate", "reserved"])
def test_the_update_refuses_what_the_snapshot_still_allowed(db, monkeypatch, change):
    """Between the look and the UPDATE the world changes: the guard decides, not the look."""
    hand = hire(db, gpu(total_mb=10_000))
    look, looks = gpus.views_and_time, list[Any]()

    def look_once(conn, stale_s, node_id=None):
        seen = looks[0] if looks else look(conn, stale_s, node_id)
        looks.append(seen)
        return seen

    db.write(lambda conn: look_once(conn, STALE_S))
    values: Any = {
        "health": {"health": "lost"},
        "stale": {"sampled_at": utc_shift(-STALE_S - 1)},
        "full": {"leased_mb": 8500},
        "foreign": {"foreign_mb": 8500},
        "quarantine": {"quarantined_at": utc_now()},
        "gate": {"gate_closed_at": utc_now()},
        "reserved": {"reserved_for": "another", "reserved_until": utc_shift(60.0)},
    }[change]
    db.write(lambda conn: conn.execute(update(schema.gpus).values(**values)))
    monkeypatch.setattr(gpus, "views_and_time", look_once)
    (answer,) = grant(db, request())
    assert answer == Denied("other requests took the memory first", Reason.CONTENDED, retry_after_s=0.1)
    assert len(looks) == 1 + grants.MAX_ROUNDS
    assert rows(db, schema.leases) == []
    assert leased(db) == [8500 if change == "full" else 0]
    assert hand.gpus


def test_one_of_two_gpus_taken_meanwhile_gives_the_other_back(db, monkeypatch):
    hire(db, gpu(0, total_mb=10_000), gpu(1, total_mb=10_000))
    seen = db.read(lambda conn: gpus.views_and_time(conn, STALE_S, None))
    monkeypatch.setattr(gpus, "views_and_time", lambda *_args: seen)
    taken = update(schema.gpus).where(schema.gpus.c.gpu_index == 1).values(foreign_mb=9000)
    db.write(lambda conn: conn.execute(taken))
    both, single = grant(db, request(5000, gpu_count=2), request(100))
    assert isinstance(both, Denied)
    assert isinstance(single, Granted)
    assert leased(db) == [100, 0]


# --- heartbeat, release, expiry ---


def test_a_heartbeat_extends_by_the_leases_own_time(db):
    hire(db, gpu())
    (answer,) = grant(db, request(ttl_s=100.0))
    expire(db, answer.request.token, seconds=-30.0)  # so much is left
    extended = heartbeat(db, answer.request.token)
    left = extended - now(db)
    assert timedelta(seconds=95) < left <= timedelta(seconds=100)


def test_an_expired_lease_cannot_be_revived(db):
    """INV-14."""
    hire(db, gpu())
    token = grant(db, request())[0].request.token
    expire(db, token)
    with pytest.raises(LeaseEnded, match="expired"):
        heartbeat(db, token)
    assert db.write(lease_purge.purge) == 1
    with pytest.raises(LeaseEnded, match="expired"):
        heartbeat(db, token)
    assert leased(db) == [0]


def test_release_is_idempotent_and_gives_the_memory_back_once(db):
    hire(db, gpu())
    grant(db, request(500))
    token = grant(db, request(1000))[0].request.token
    assert [release(db, token) for _ in range(3)] == ["active", "released", "released"]
    assert leased(db) == [500]
    with pytest.raises(LeaseEnded, match="released"):
        heartbeat(db, token)
    events = [entry.event_type for entry in rows(db, schema.audit)]
    assert events.count("lease.released") == 1


def test_release_after_expiry_gives_the_memory_back_once(db):
    hire(db, gpu())
    token = grant(db, request())[0].request.token
    expire(db, token)
    assert release(db, token) == "active"  # nobody had purged it yet
    assert db.write(lease_purge.purge) == 0
    assert leased(db) == [0]


def test_a_release_whose_answer_was_lost_is_repeated_harmlessly(db, lose_commits):
    hire(db, gpu())
    token = grant(db, request())[0].request.token
    lose_commits(1)
    assert release(db, token) == "released"
    assert leased(db) == [0]


@pytest.mark.parametrize("token", ["", "nonsense", "x" * 10_000, "🦊"])
def test_an_unknown_token_is_not_found(db, token):
    for call in (heartbeat, release):
        with pytest.raises(LeaseNotFound):
            call(db, token)


def test_what_the_table_shows_opens_nothing(db):
    hire(db, gpu())
    (answer,) = grant(db, request())
    (lease,) = rows(db, schema.leases)
    assert answer.request.token not in repr(rows(db, schema.leases) + rows(db, schema.audit))
    with pytest.raises(LeaseNotFound):
        release(db, lease.token)


def test_purge_ends_what_is_over_and_never_what_lives(db):
    """INV-17."""
    hire(db, gpu())
    over, alive, kept = (answer.request.token for answer in grant(db, *[request(100 * n) for n in (1, 2, 3)]))
    expire(db, over)
    expire(db, alive, seconds=-30.0)
    assert db.write(lease_purge.purge) == 1
    assert db.write(lease_purge.purge) == 0
    assert leased(db) == [500]
    for token in (alive, kept):
        heartbeat(db, token)
    assert [e.event_type for e in rows(db, schema.audit)].count("lease.expired") == 1


def test_purge_works_in_bounded_steps(db):
    hire(db, gpu())
    for answer in grant(db, *[request(10) for _ in range(5)]):
        expire(db, answer.request.token)
    assert [db.write(lambda conn: lease_purge.purge(conn, 2)) for _ in range(4)] == [2, 2, 1, 0]
    assert leased(db) == [0]


def test_the_lease_of_a_job_lives_by_the_heartbeats_of_its_worker(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    expire_job_lease(db, claim)
    hand.beat(busy=1)
    (lease,) = rows(db, schema.leases)
    assert lease.expires_at > now(db)
    assert db.write(lease_purge.purge) == 0
    expire_job_lease(db, claim)
    assert db.write(lease_purge.purge) == 1
    assert leased(db) == [1000]  # until somebody sees that its processes are gone
    hand.beat()
    assert leased(db) == [0]
    hand.finish(claim)
    assert leased(db) == [0]


def test_ended_leases_are_forgotten_after_a_while_and_live_ones_never(db):
    hire(db, gpu())
    ended, alive = (answer.request.token for answer in grant(db, request(), request()))
    release(db, ended)
    expire(db, ended, seconds=50.0)
    expire(db, alive, seconds=50.0)
    assert db.write(lambda conn: lease_purge.forget(conn, 60.0)) == 0
    assert db.write(lambda conn: lease_purge.forget(conn, 40.0)) == 1
    with pytest.raises(LeaseNotFound):
        heartbeat(db, ended)
    assert release(db, alive) == "active"


# --- under load ---


def test_no_gpu_is_ever_overcommitted(db_url, open_database):
    """INV-12: random sizes from many threads, looked at all the time, balanced at the end."""
    # Nobody waits for a connection, or for a row in vain, however slow the machine.
    db = open_database(db_url, db_pool_size=32, db_timeout_s=30.0, worker_timeout_s=45.0)
    threads, rounds = (8, 5) if is_sqlite(db) else (32, 10)  # 10,240 tries on MariaDB
    crowds = (31, 1)  # tries to a transaction, one after the other, in each round
    hire(db, gpu(0), gpu(1))
    over, samples, granted, stop = list[Any](), [0], [0] * threads, threading.Event()
    tries = [0] * threads

    def watch():
        shares = (
            select(schema.lease_gpus.c.gpu_uuid, func.sum(schema.lease_gpus.c.memory_mb).label("held"))
            .join(schema.leases, schema.leases.c.token == schema.lease_gpus.c.token)
            .where(schema.leases.c.state == "active")
            .group_by(schema.lease_gpus.c.gpu_uuid)
            .subquery()
        )
        # One statement: one moment.
        look = select(schema.gpus, func.coalesce(shares.c.held, 0).label("held")).outerjoin(
            shares, shares.c.gpu_uuid == schema.gpus.c.gpu_uuid
        )
        cards = by_key(select(schema.gpus.c.gpu_uuid), schema.gpus).order_by(schema.gpus.c.gpu_uuid)

        def look_alone(conn):
            """Whoever changes a lease holds its GPUs until it commits, and now we do."""
            conn.execute(cards.with_for_update()).all()
            return conn.execute(look).all()

        while not stop.is_set():
            books = db.read(lambda conn: conn.execute(look).all())
            over.extend(g for g in books if g.leased_mb > g.usable_mb)
            if any(g.leased_mb != g.held for g in books):
                # It was seen once, under much load: a snapshot with a transaction and without one that it waited for.
                over.extend(g for g in db.write(look_alone) if g.leased_mb != g.held)
            samples[0] += 1

    def wish(dice):
        return request(dice.choice([10, 500, 2000, 8000, 15_000]), gpu_count=dice.choice([1, 1, 2]))

    def hammer(n):
        dice, held = random.Random(n), []
        for _ in range(rounds):
            for crowd in crowds:
                wishes = [wish(dice) for _ in range(crowd)]
                answers = grant(db, *wishes)
                held += [answer.request.token for answer in answers if isinstance(answer, Granted)]
                tries[n] += len(answers)
            granted[n] += len(held)
            dice.shuffle(held)
            # Not all: the next round is to find little room.
            keep = dice.choice([0, 1, 1])
            release_all(held[keep:])
            del held[keep:]
        release_all(held)

    def release_all(tokens):
        db.write(lambda conn: leases.free(conn, [token_hash(token) for token in tokens]))

    watcher = threading.Thread(target=watch, name="watcher")
    watcher.start()
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(hammer, range(threads)))
    finally:
        stop.set()
        watcher.join(30)
    assert over == []
    assert samples[0] > 20
    assert sum(granted) > threads
    assert is_sqlite(db) or sum(tries) >= 10_000
    assert leased(db) == [0, 0]
    assert active_leases(db) == []
    while db.write(lambda conn: lease_purge.forget(conn, 60.0)):
        pass
    assert rows(db, schema.leases) == rows(db, schema.lease_gpus) == []


# --- leases of a process on the GPU that it goes on using ---


def test_a_process_may_take_one_lease_after_the_other_on_the_same_gpu(db):
    """Its memory under the second is no memory that did not come back from the first."""
    node = hire(db, gpu(0, total_mb=10_000))
    first, second = grant(db, request(3000, pid=77, node_id="node-1"), request(4000, pid=77, node_id="node-1"))
    used = gpu(0, total_mb=10_000, used_mb=4000, processes=(GpuProcess(77, 4000, lineage=(77, 1)),))
    release(db, first.request.token)
    assert leased(db) == [7000]
    assert node.sees(used, patience_s=0.0).quarantined == ()
    assert leased(db) == [4000]
    release(db, second.request.token)
    assert node.sees(used, patience_s=0.0).quarantined == ("GPU-0",)


def test_memory_beyond_the_leases_that_go_on_did_not_come_back(db):
    node = hire(db, gpu(0, total_mb=10_000))
    first, _second = grant(db, request(3000, pid=77, node_id="node-1"), request(4000, pid=77, node_id="node-1"))
    release(db, first.request.token)
    used = gpu(0, total_mb=10_000, used_mb=4001, processes=(GpuProcess(77, 4001, lineage=(77, 1)),))
    node.sees(used, patience_s=60.0)
    assert leased(db) == [7000]
    node.sees(used, patience_s=0.0)
    (row,) = rows(db, schema.gpus)
    assert (row.leased_mb, row.foreign_mb, row.quarantined_at is None) == (4000, 1, False)


def test_a_sample_taken_before_a_lease_ended_does_not_show_its_processes_gone(db):
    """They may have come after it was taken, and its transaction waited."""
    node = hire(db, gpu(0, total_mb=10_000))
    (held,) = grant(db, request(3000, pid=77, node_id="node-1"))
    before = time.monotonic()
    release(db, held.request.token)

    def record(taken_at):
        sample = [gpu(0, total_mb=10_000)]
        db.write(
            lambda conn: inventory.take_stock(
                conn, "node-1", [node.worker_id], sample, Gate(90), (), 60.0, taken_at=taken_at
            ),
        )

    record(before - 0.1)
    assert leased(db) == [3000]
    age_ending(db, 20.0)
    record(time.monotonic())
    assert leased(db) == [0]


def test_a_sample_is_as_old_as_the_question_not_as_its_row(db):
    node = hire(db)
    taken_at = time.monotonic() - STALE_S - 1
    db.write(
        lambda conn: inventory.take_stock(
            conn, "node-1", [node.worker_id], [gpu(0)], Gate(90), (), 60.0, taken_at=taken_at
        )
    )
    (answer,) = grant(db, request(1000))
    assert (answer.code, leased(db)) == (Reason.STALE, [0])


def age_ending(db, seconds):
    """As if the lease had begun to end that long ago."""
    db.write(lambda conn: conn.execute(update(schema.leases).values(ending_since=utc_shift(-seconds))))
