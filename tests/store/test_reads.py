"""Questions about jobs: pages without gaps or repeats, and refusals that explain themselves."""

import pytest

from orchestrator.errors import InvalidInput
from orchestrator.jobs import Status
from orchestrator.store import audit, job_reads
from orchestrator.store.job_reads import Filter, statuses
from orchestrator.store.submit import submit_jobs
from tests.factories import POLICY, hire, new_job, submit


def walk(db, wanted=Filter(), limit=7):  # noqa: B008 - frozen
    seen, cursor = [], None
    while True:
        records, cursor = db.read(lambda conn, at=cursor: job_reads.page(conn, wanted, limit, at))
        assert len(records) <= limit
        seen += [record["job_id"] for record in records]
        if cursor is None:
            return seen


def test_pages_show_every_job_once_newest_first(db):
    ids = [job_id for _ in range(4) for job_id in submit(db, 5)]  # rows of one batch share their moment
    seen = walk(db)
    assert sorted(seen) == sorted(ids)
    created = {job_id: n // 5 for n, job_id in enumerate(ids)}
    assert [created[job_id] for job_id in seen] == sorted(created.values(), reverse=True)


def test_a_page_that_ends_exactly_has_no_next(db):
    submit(db, 7)
    records, cursor = db.read(lambda conn: job_reads.page(conn, Filter(), 7, None))
    assert (len(records), cursor) == (7, None)


def test_filters_narrow_and_combine(db):
    hand = hire(db)
    mine = submit(db, 3, agent="me", pool_id="fast")
    submit(db, 3, agent="you", pool_id="fast")
    submit(db, 3, agent="me", type="other")
    hand.claim(mine[0])
    assert len(walk(db, Filter(agent="me"))) == 6
    assert len(walk(db, Filter(pool_id="fast"))) == 6
    assert sorted(walk(db, Filter(agent="me", type="echo"))) == sorted(mine)
    assert walk(db, Filter(status=Status.CLAIMED)) == [mine[0]]
    assert walk(db, Filter(status=Status.DONE)) == []


@pytest.mark.parametrize("cursor", ["", "x", "////", "bm90IGEgY3Vyc29y", "🦊", "MjAyNi0wMS0wMQ=="])
def test_a_cursor_that_nobody_gave_out_is_refused(db, cursor):
    with pytest.raises(InvalidInput) as refused:
        db.read(lambda conn: job_reads.page(conn, Filter(), 5, cursor))
    assert refused.value.field == "cursor"


def test_a_record_hides_what_is_nobodys_business(db):
    (job_id,) = submit(db)
    record = db.read(lambda conn: job_reads.get(conn, job_id))
    assert not {"payload_hash", "lease_token", "rank", "lane"} & set(record)
    assert record["pool_id"] == "default"
    records, _ = db.read(lambda conn: job_reads.page(conn, Filter(), 5, None))
    assert "payload" not in records[0]


def test_who_is_terminal(db):
    hand = hire(db)
    over, open_job = submit(db, 2)
    hand.finish(*hand.claim(over))
    assert db.read(lambda conn: job_reads.terminal_among(conn, [over, open_job, "nobody"])) == {
        over,
        "nobody",
    }
    assert db.read(lambda conn: statuses(conn, [over, open_job, "nobody"])) == {
        over: Status.DONE,
        open_job: Status.PENDING,
    }


def test_the_history_of_a_job_is_paged_by_id(db):
    hand = hire(db)
    submit_jobs(db, [new_job(job_id="j")], POLICY)
    for _ in range(3):
        hand.hand_back(*hand.claim("j"))
    whole = db.read(lambda conn: audit.of_job(conn, "j"))
    assert len(whole) == 7
    rest = db.read(lambda conn: audit.of_job(conn, "j", after_id=whole[4]["id"], limit=1))
    assert rest == whole[5:6]
    assert whole[1]["worker_id"] == hand.worker_id
