"""A saturated key costs nobody anything, however many jobs wait for it."""

import pytest
from sqlalchemy import text

from orchestrator.admission import Admitted
from orchestrator.policies import Book
from orchestrator.store import caps, outbox
from orchestrator.store.settle import finish_all
from tests.conftest import empty
from tests.factories import done, hire, new_job, submit, traffic

BOOK = Book(1, caps={"agent:*": 1, "host:*": 1})
FILL = (
    "INSERT INTO orchestrator_jobs (job_id, type, payload, payload_hash, agent, lane, max_attempts, `rank`, queued,"
    " blocked_on) SELECT CONCAT('flood-', seq), 'echo', '[]', '', 'flood', 'default', 5, seq, 'blocked',"
    " 'cap:agent:flood' FROM seq_{first}_to_{last}"
)
#: Rows that one statement writes well within its time.
CHUNK = 5_000


@pytest.fixture
def crowded(maria_db):
    """Emptied as a whole afterwards: the next test would delete row by row."""
    yield maria_db
    maria_db.write(lambda conn: conn.execute(text("TRUNCATE TABLE orchestrator_jobs")))


def cost(db, work):
    """Statements, and rows that the server read for them."""
    reads = "SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler_read%'"

    def counted(conn):
        before = sum(int(row[1]) for row in conn.execute(text(reads)))
        with traffic(db) as seen:
            work(conn)
        return len(seen.statements), sum(int(row[1]) for row in conn.execute(text(reads))) - before

    return db.write(counted)


def costs(db, backlog):
    """One job of an agent runs, so many wait; and somebody else comes."""
    empty(db)
    hand = hire(db)
    hand.book = BOOK
    (running,) = hand.claim(*submit(db, agent="flood"))
    for first in range(1, backlog, CHUNK):
        chunk = text(FILL.format(first=first, last=min(first + CHUNK - 1, backlog)))
        db.write(lambda conn, chunk=chunk: conn.execute(chunk))
    db.write(lambda conn: conn.execute(text("ANALYZE TABLE orchestrator_jobs")).all())
    submit(db, agent="calm", concurrency_keys=["host:calm"])

    def publish(conn):
        assert len(outbox.take(conn, "default", 10, caps=caps.Glance(conn, BOOK))) == 1

    def admit(conn):
        (how,) = caps.admit(conn, BOOK, [new_job(agent="flood")])
        assert isinstance(how, Admitted)
        assert how.blocked_on == "cap:agent:flood"

    def lead(conn):
        assert caps.heal(conn) == 0
        assert caps.let_go(conn, BOOK, "", 100).released == 0

    def end(conn):
        seats = caps.Seats(conn, BOOK)
        seats.expect(held=running.caps)
        finish_all(conn, hand.by, [done(running)], seats)
        seats.close()
        assert seats.freed == {"default"}

    return {work.__name__: cost(db, work) for work in (publish, admit, lead, end)}


def test_what_others_pay_does_not_grow_with_those_who_wait(crowded):
    few, many = costs(crowded, 10), costs(crowded, 20_000)
    assert {name: statements for name, (statements, _) in few.items()} == {
        name: statements for name, (statements, _) in many.items()
    }
    assert {name: (few[name], rows) for name, (_, rows) in many.items() if rows > few[name][1] + 5} == {}
