"""Workers do not wait for each other: a transaction locks its own jobs and leases, never a neighbour's.

Tables are small here on purpose. A planner that finds a scan cheaper than a few look-ups would lock, or wait
for, the rows of everyone; two such transactions deadlock.
"""

import threading

import pytest

from orchestrator.store import leases
from orchestrator.store.claim import claim_jobs
from orchestrator.store.settle import record
from tests.factories import POLICY, done, failed, gpu, hire, submit


@pytest.fixture
def beside(maria_db):
    """`beside(open_work, other_work)`: run the second while the first is open; it must not wait for it."""

    def run(open_work, other_work):
        with maria_db.engine.connect() as connection:
            open_work(connection)
            finished = []
            thread = threading.Thread(target=lambda: finished.append(other_work()), name="beside")
            thread.start()
            thread.join(2)
            waited = thread.is_alive()
            connection.rollback()
            thread.join(20)
        assert not waited, "it waited for a neighbour's transaction"
        return finished[0]

    return run


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
