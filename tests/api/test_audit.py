"""GET /audit: pages back in time, and from some moment on without a hole."""

import pytest
from sqlalchemy import insert, text

from orchestrator.store import audit, schema
from orchestrator.store.audit import Event, Filter
from tests.waiting import wait_until


def write(db, *events: Event) -> None:
    db.write(lambda conn: audit.record(conn, events))


def ids(found) -> list[int]:
    return [event["details"]["n"] for event in found]


def numbered(count: int, **fields) -> list[Event]:
    return [Event(**({"event_type": "pool.created", "details": {"n": n}} | fields)) for n in range(count)]


def test_pages_go_back_to_the_first_event(api):
    write(api.db, *numbered(25))
    seen, cursor = [], None
    while True:
        at: dict = {} if cursor is None else {"cursor": cursor}
        page = api.get("/audit", params={"limit": 10, "event_type": "pool.created"} | at).json()
        seen += ids(page["events"])
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == list(range(24, -1, -1))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"event_type": "pool.created"}, ["pool.created"]),
        ({"event_type": "pool.*"}, ["pool.drained", "pool.created"]),
        ({"event_type": "poo.*"}, []),
        ({"job_id": "j"}, ["job.done"]),
        ({"worker_id": "w"}, ["job.done"]),
        ({"actor": "ann", "event_type": "pool.*"}, ["pool.drained"]),
        ({"pool_id": "p"}, ["pool.drained", "pool.created"]),
    ],
)
def test_filters(db, given, found):
    write(
        db,
        Event("pool.created", pool_id="p"),
        Event("pool.drained", pool_id="p", actor="ann"),
        Event("poolside", pool_id="q"),
        Event("job.done", job_id="j", worker_id="w"),
    )
    events, cursor = db.read(lambda conn: audit.page(conn, Filter(**given), 10))
    assert [event["event_type"] for event in events] == found and cursor is None


def test_a_filter_that_fits_nothing_looks_at_a_bounded_part_and_says_where_to_go_on(db, monkeypatch):
    monkeypatch.setattr(audit, "WINDOW", 10)
    write(db, Event("pool.created"), *numbered(35, event_type="job.done"))
    wanted, looks, cursor = Filter(event_type="pool.created"), [], None
    while True:
        found, cursor = db.read(lambda conn, at=cursor: audit.page(conn, wanted, 5, at))
        looks.append(len(found))
        if cursor is None:
            break
    assert looks == [0, 0, 0, 1]
    # A job's rows have an index: one look finds them all.
    write(db, Event("job.odd", job_id="old"), *numbered(35, event_type="job.done"))
    found, cursor = db.read(lambda conn: audit.page(conn, Filter(job_id="old"), 5))
    assert len(found) == 1 and cursor is None


def test_an_empty_trail(db):
    assert db.read(lambda conn: audit.page(conn, Filter(), 5)) == ([], None)
    assert db.read(lambda conn: audit.since(conn, Filter(), 5, 0)) == ([], 0)


def test_bad_questions(api):
    for given in (
        {"limit": 0},
        {"limit": 1001},
        {"cursor": "x"},
        {"event_type": "Robert'); --"},
        {"since": 1},
        {"after": -1},
        {"after": 1, "cursor": 5},
    ):
        answer = api.get("/audit", params=given)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input"), given


def test_following_tells_each_event_once_and_in_order(api):
    start = api.led().get("/audit").json()["next_after"]
    write(api.db, *numbered(7))
    seen, after = [], start
    for _ in range(4):
        page = api.get("/audit", params={"after": after, "limit": 3, "event_type": "pool.created"}).json()
        seen += ids(page["events"])
        after = page["next_after"]
    assert seen == list(range(7))
    assert api.get("/audit", params={"after": after}).json()["next_after"] == after


def test_who_follows_waits_for_a_transaction_that_began_earlier(maria_db, open_database, monkeypatch):
    """Its rows have lower ids, and are not there yet when later ones are."""
    monkeypatch.setattr(audit, "GAP_S", 60.0)
    # The server ends a transaction that idles for a third of this: it must not, only because the machine is busy.
    db = open_database(str(maria_db.settings.database_url), worker_timeout_s=45.0)
    write(db, Event("first"))
    with db.engine.connect() as slow:
        slow.execute(insert(schema.audit), [{"event_type": "slow"}])
        write(db, Event("later"))
        found, after = db.read(lambda conn: audit.since(conn, Filter(), 10, 0))
        assert [event["event_type"] for event in found] == ["first"]
        assert db.read(audit.settled_id) == after
        slow.commit()
    found, after = db.read(lambda conn: audit.since(conn, Filter(), 10, after))
    assert [event["event_type"] for event in found] == ["slow", "later"]
    # One that is never written holds nobody up for long.
    with db.engine.connect() as never:
        never.execute(insert(schema.audit), [{"event_type": "never"}])
        never.rollback()
    write(db, Event("last"))
    assert db.read(lambda conn: audit.since(conn, Filter(), 10, after)) == ([], after)
    monkeypatch.setattr(audit, "GAP_S", 0.0)
    found, _ = wait_until(lambda: (seen := db.read(lambda conn: audit.since(conn, Filter(), 10, after)))[0] and seen)
    assert [event["event_type"] for event in found] == ["last"]


def test_a_look_without_an_index_reads_no_more_than_its_window(maria_db, monkeypatch):
    monkeypatch.setattr(audit, "WINDOW", 50)
    write(maria_db, *numbered(2000, event_type="job.done"))
    with maria_db.engine.connect() as connection:
        connection.execute(text("FLUSH STATUS"))
        audit.page(connection, Filter(event_type="pool.created"), 10)
        read = dict(connection.execute(text("SHOW SESSION STATUS LIKE 'Handler_read%'")).all())
    assert sum(int(value) for key, value in read.items() if key != "Handler_read_key") < 100, read
