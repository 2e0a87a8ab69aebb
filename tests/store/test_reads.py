"""Questions about jobs: pages without gaps or repeats, and refusals that explain themselves."""

import pytest
from sqlalchemy import text

from orchestrator.errors import InvalidInput
from orchestrator.jobs import Status
from orchestrator.store import audit, job_reads, paging
from orchestrator.store.job_reads import Filter, statuses
from orchestrator.store.submit import submit_jobs
from tests.factories import POLICY, hire, new_job, rows_read, submit


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


def test_what_no_index_has_is_looked_for_a_window_at_a_time(db, monkeypatch):
    """One in forty matches: most pages are empty, the walk ends all the same and nothing is missing."""
    monkeypatch.setattr(paging, "WINDOW", 10)
    hand = hire(db)
    rare = []
    for n in range(4):
        submit(db, 25)
        rare += submit(db, 1, type="rare", pool_id="side", agent="me") if n % 2 else []
    hand.finish(*hand.claim(rare[0], memory_mb=0))
    for wanted in (Filter(type="rare"), Filter(pool_id="side"), Filter(pool_id="side", type="rare")):
        assert walk(db, wanted) == rare[::-1], wanted
    assert walk(db, Filter(status=Status.DONE, type="rare")) == walk(db, Filter(agent="me", status=Status.DONE))
    assert walk(db, Filter(type="rare", status=Status.PENDING)) == rare[1:]
    assert walk(db, Filter(type="unheard-of")) == []
    empty = db.read(lambda conn: job_reads.page(conn, Filter(type="unheard-of"), 5, None))
    assert empty[0] == [] and empty[1] is not None


@pytest.mark.parametrize("count", [9, 10, 11, 20])
def test_a_window_that_ends_with_the_last_job_is_the_end(db, monkeypatch, count):
    monkeypatch.setattr(paging, "WINDOW", 10)
    submit(db, count)
    pages, cursor = 0, None
    while pages == 0 or cursor:
        _, cursor = db.read(lambda conn, at=cursor: job_reads.page(conn, Filter(type="unheard-of"), 5, at))
        pages += 1
    assert pages == -(-count // 10)


@pytest.mark.parametrize("limit", [3, 50])
def test_the_jobs_of_a_moment_are_shown_once_wherever_pages_and_windows_end(db, monkeypatch, limit):
    monkeypatch.setattr(paging, "WINDOW", 10)
    ids = submit(db, 25, type="common")
    assert sorted(walk(db, Filter(type="common"), limit)) == sorted(ids)


#: Tags that a careless comparison takes for one another: case, quotes, wildcards, spaces, what JSON writes otherwise.
TAGS = [
    *(
        "a",
        "A",
        "a ",
        " a",
        "ab",
        "a%",
        "a_",
        "%",
        "_",
        "á",
        "a\u0301",
        "é",
        "É",
        "🦊",
        "ß",
        "ss",
        "\x00",
        "a\x00",
        "a\x00b",
    ),
    *('"', '"a', 'a"', '"a"', "'", "'a'", "\\", "\\a", "a\\", '\\"a', "\\u00e9", "\n", "a\nb", "/", "\\/"),
    *(", ", '", "', "]", "[", "[]", '["a"]', "{}", "1", "1.0", "null", "true", "$", "$[0]", "*", "-", "--"),
]


def test_a_tag_is_found_as_it_is_and_no_other(db):
    bodies = [[tag] for tag in TAGS] + [[TAGS[n], tag] for n, tag in enumerate(TAGS[1:])] + [["x", "a", "y"], ["z"], []]
    batch = [new_job(tags=tags) for tags in bodies]
    submit_jobs(db, batch, POLICY)
    for tag in [*TAGS, "x", "unheard-of"]:
        expected = sorted(job.job_id for job, tags in zip(batch, bodies, strict=True) if tag in tags)
        assert sorted(walk(db, Filter(tag=tag), limit=20)) == expected, repr(tag)


def test_a_tag_combines_with_the_other_filters(db):
    mine = submit(db, 2, agent="me", tags=["red", "blue"])
    submit(db, 2, agent="you", tags=["red"])
    submit(db, 2, agent="me", tags=["blue"])
    assert sorted(walk(db, Filter(agent="me", tag="red"))) == sorted(mine)
    assert walk(db, Filter(agent="me", tag="red", type="other")) == []


def test_a_page_costs_its_window_whatever_the_table_holds(maria_db):
    """A filter that matches nothing, among 20,000 jobs: the entries of a window and their rows, and that is all."""
    columns = "job_id, type, payload, payload_hash, agent, lane, max_attempts, `rank`, created_at"
    job = "CONCAT('j-', seq), 'echo', '{}', '', 'a', 'default', 5, seq, utc_timestamp(6) - INTERVAL seq SECOND"
    fill = f"INSERT INTO orchestrator_jobs ({columns}) SELECT {job} FROM "
    for first in range(1, 20_000, 5000):  # each within the time limit, on the busiest machine
        maria_db.write(lambda conn, some=f"seq_{first}_to_{first + 4999}": conn.execute(text(fill + some)))
    for wanted in (Filter(pool_id="nowhere"), Filter(tag="unheard-of"), Filter(agent="a", type="unheard-of")):
        cursor, pages = None, 0
        with maria_db.engine.connect() as connection:
            while cursor is not None or not pages:
                before = rows_read(connection)
                found, cursor = job_reads.page(connection, wanted, 50, cursor)
                # And a row at each end of both.
                assert rows_read(connection) - before <= 2 * paging.WINDOW + 10, wanted
                assert found == []
                pages += 1
        assert pages == 20_000 // paging.WINDOW, wanted
    maria_db.write(lambda conn: conn.execute(text("TRUNCATE TABLE orchestrator_jobs")))  # quicker than to delete them


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
