"""Workers do not wait for each other: a transaction locks its own jobs and leases, never a neighbour's.

Tables are small here on purpose. A planner that finds a scan cheaper than a few look-ups would lock, or wait
for, the rows of everyone; two such transactions deadlock.
"""

import pytest
from sqlalchemy import update

from orchestrator.leases import LeaseRequest, Remains, ResidentSlot, Terms
from orchestrator.store import grants, leases, residency, schema
from orchestrator.store.claim import claim_jobs
from orchestrator.store.dialect import utc_shift
from orchestrator.store.settle import Left, end_leases, record
from tests.factories import POLICY, STALE_S, done, failed, gpu, hire, rows, submit


@pytest.mark.parametrize("others", [1, 4, 16])
def test_claims_of_two_workers(maria_db, beside, others):
    one, other, ids = hire(maria_db), hire(maria_db), submit(maria_db, 4 + others)
    claimed = beside(lambda conn: claim_jobs(conn, one.by, ids[:4], lambda _type: 0), lambda: other.claim(*ids[4:]))
    assert len(claimed) == others


@pytest.mark.parametrize("others", [1, 4, 16])
@pytest.mark.parametrize("how", [done, failed])
def test_endings_of_two_workers(maria_db, beside, how, others):
    one, other = hire(maria_db), hire(maria_db)
    mine, theirs = one.claim(*submit(maria_db, 4)), other.claim(*submit(maria_db, others))
    one.start(*mine)
    other.start(*theirs)
    settled = beside(
        lambda conn: record(conn, one.by, [], [how(claim) for claim in mine], POLICY),
        lambda: other.record(ends=[how(claim) for claim in theirs]),
    )
    assert all(item.arrow for item in settled)


@pytest.mark.parametrize("others", [1, 4, 16])
def test_leases_of_two_workers_on_different_gpus(maria_db, beside, others):
    one, other = hire(maria_db, gpu(0), node="a"), hire(maria_db, gpu(1), node="b")
    mine = one.claim(*submit(maria_db, 4, min_memory_mb=10))
    theirs = other.claim(*submit(maria_db, others, min_memory_mb=10))
    freed = beside(
        lambda conn: leases.free(conn, [claim.lease.key for claim in mine]),
        lambda: maria_db.write(lambda conn: leases.free(conn, [claim.lease.key for claim in theirs])),
    )
    assert freed == others


# --- warm models ---


def ask(db, memory_mb):
    (answer,) = db.write(lambda conn: grants.grant(conn, [LeaseRequest("a", memory_mb, 60.0)], Terms(STALE_S)))
    return answer


def warm_models(hand, count, memory_mb=1000):
    """Idle for a while; the keys of their leases."""
    db = hand.db
    keys = [f"model:{hand.worker_id}:{n}" for n in range(count)]
    for n, claim in enumerate(hand.claim(*submit(db, count, min_memory_mb=memory_mb))):
        hand.record(ends=[done(claim)._replace(left=Left(Remains.MODEL, f"{hand.worker_id}#{n}", keys[n], "echo"))])
    old = update(schema.leases).where(schema.leases.c.token.in_(keys))
    db.write(lambda conn: conn.execute(old.values(created_at=utc_shift(-1000.0), idle_since=utc_shift(-100.0))))
    return keys


@pytest.mark.parametrize("others", [1, 4, 16])
def test_making_room_waits_for_nobody_who_uses_a_warm_model(maria_db, beside, others):
    hand = hire(maria_db, gpu(total_mb=20_000))  # 18,000 usable
    keys = warm_models(hand, others)
    slots = [ResidentSlot(key, "echo", None, 1000, ()) for key in keys]

    def occupy(conn):
        assert all(residency.occupy(conn, slot, "job", hand.worker_id) for slot in slots)

    answer = beside(occupy, lambda: ask(maria_db, 17_500))
    assert not answer.evicting


@pytest.mark.parametrize("others", [1, 4, 16])
def test_making_room_waits_for_nobody_who_ends_a_lease(maria_db, beside, others):
    """Their leases are on other GPUs: they hold locks on leases, and would like ours on GPUs."""
    hand, other = hire(maria_db, gpu(0, total_mb=20_000), node="a"), hire(maria_db, gpu(1, total_mb=1000), node="b")
    (idle,) = warm_models(hand, 1)
    claims = other.claim(*submit(maria_db, others, min_memory_mb=10))
    answer = beside(
        lambda conn: leases.free(conn, [claim.lease.key for claim in claims]), lambda: ask(maria_db, 17_500)
    )
    assert answer.evicting
    assert [lease.token for lease in rows(maria_db, schema.leases) if lease.evicted_at] == [idle]


@pytest.mark.parametrize("others", [1, 4, 16])
def test_warm_models_of_two_workers(maria_db, beside, others):
    """Keeping, letting go and occupying lock their own leases only."""
    one, other = hire(maria_db, gpu(0), node="a"), hire(maria_db, gpu(1), node="b")
    mine = one.claim(*submit(maria_db, 4, min_memory_mb=10))
    theirs = other.claim(*submit(maria_db, others, min_memory_mb=10))

    def left(hand, n, claim):
        kept = Left(Remains.MODEL, f"{hand.worker_id}#{n}", f"model:{hand.worker_id}:{n}", "echo")
        return claim.lease.key, kept if n % 2 else Left(Remains.PROCESSES, f"{hand.worker_id}#{n}")

    def settle(conn, hand, claims):
        end_leases(conn, [left(hand, n, claim) for n, claim in enumerate(claims)])
        return len(claims)

    settled = beside(
        lambda conn: settle(conn, one, mine),
        lambda: maria_db.write(lambda conn: settle(conn, other, theirs)),
    )
    assert settled == others


def test_a_heartbeat_does_not_wait_for_the_leases_of_others(maria_db, beside):
    one, other = hire(maria_db, gpu(0), node="a"), hire(maria_db, gpu(1), node="b")
    mine = one.claim(*submit(maria_db, 4, min_memory_mb=10))
    other.claim(*submit(maria_db, 4, min_memory_mb=10))
    beside(lambda conn: leases.free(conn, [claim.lease.key for claim in mine]), lambda: other.beat(busy=4))
