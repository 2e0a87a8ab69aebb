"""Transactions: run again from their start after contention or a broken connection, never half done."""

import time
from functools import partial
from itertools import product
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import event, select, text, update

from orchestrator.errors import DatabaseUnavailable
from orchestrator.placement import look
from orchestrator.settings import Settings
from orchestrator.store import audit, database, ownership, schema
from orchestrator.store.database import Database, RowsHeld, TookTooLong, Waiting
from orchestrator.store.dialect import dialect_of
from orchestrator.store.submit import MANY, Verdict, submit_jobs
from tests.factories import (
    POLICY,
    active_leases,
    gpu,
    hire,
    holding,
    holding_job,
    is_sqlite,
    new_job,
    row,
    rows,
    submit,
)
from tests.proxy import Proxy
from tests.servers import MariaDB, free_port
from tests.tables import make_tables
from tests.waiting import wait_until


class Faults:
    """Errors of the server, raised before the n-th statement that matches."""

    def __init__(self, db):
        self.db, self.errors, self.pattern, self.after = db, [], "", 0

    def __call__(self, cursor, statement, parameters, context):
        if self.errors and self.pattern in statement:
            self.after -= 1
            if self.after < 0:
                raise self.errors.pop(0)

    def inject(self, *codes, pattern="", after=0):
        self.pattern, self.after = pattern, after
        dbapi = self.db.engine.dialect.dbapi
        if is_sqlite(self.db):
            self.errors = [dbapi.OperationalError("database is locked") for _ in codes]
        else:
            self.errors = [dbapi.OperationalError(code, "injected") for code in codes]


@pytest.fixture
def faults(db):
    injected = Faults(db)
    names = ("do_execute", "do_executemany")
    for name in names:
        event.listen(db.engine, name, injected)
    yield injected
    for name in names:
        event.remove(db.engine, name, injected)


def test_contention_at_every_statement_is_retried_from_the_start(db, faults, monkeypatch):
    """F-26. 1205 rolls back only one statement; without a rollback of all, the first half would be kept."""
    monkeypatch.setattr(look, "YOUNG_S", 0.0)  # else some lives read the GPUs and some do not
    hand = hire(db, gpu())
    whole_life_statements(db, hand)  # the first job of a lane adds the lane
    count = len(whole_life_statements(db, hand))
    codes = [1213] if is_sqlite(db) else [1213, 1205, 1020]  # SQLite has one error for all of it
    for code, statement in product(codes, range(count)):
        faults.inject(code, after=statement)
        (job_id,) = submit(db, min_memory_mb=1000)
        (claim,) = hand.claim(job_id)
        assert (claim.attempt, row(db, job_id).attempts) == (1, 1)
        hand.finish(claim)
        assert faults.errors == [], f"statement {statement} was not reached"
    events = [entry.event_type for entry in rows(db, schema.audit)]
    lives = len(codes) * count + 2
    assert [events.count(f"job.{what}") for what in ("submitted", "claimed", "done")] == [lives] * 3
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]
    assert active_leases(db) == []


def whole_life_statements(db, hand):
    seen = []

    def note(_conn, _cursor, statement, *_rest):
        seen.append(statement)

    event.listen(db.engine, "before_cursor_execute", note)
    hand.finish(*hand.claim(*submit(db, min_memory_mb=1000)))
    event.remove(db.engine, "before_cursor_execute", note)
    return [statement for statement in seen if not statement.startswith("BEGIN")]


def test_contention_without_end_is_reported_and_leaves_nothing(db, faults, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    faults.inject(*[1213] * 100, pattern="orchestrator_audit")
    with pytest.raises(DatabaseUnavailable):
        submit_jobs(db, [new_job(job_id="j")], POLICY)
    assert len(faults.errors) == 100 - database.MAX_RUNS
    faults.errors = []
    assert rows(db, schema.jobs) == []


def test_an_error_of_the_work_itself_rolls_back_and_is_not_retried(db):
    runs = []

    def work(conn):
        runs.append(1)
        conn.execute(schema.lanes.insert(), {"lane": "x"})
        raise LookupError("mine")

    with pytest.raises(LookupError):
        db.write(work)
    assert len(runs) == 1
    assert rows(db, schema.lanes) == []


def test_a_connection_killed_in_the_middle_is_replaced_and_the_work_done_once(maria_db, mariadb):
    """F-23."""
    runs: list[Any] = []

    def work(conn):
        conn.execute(schema.lanes.insert(), {"lane": f"lane-{len(runs)}"})
        runs.append(conn.execute(text("SELECT CONNECTION_ID()")).scalar())
        if len(runs) == 1:
            kill(mariadb, runs[0])
        conn.execute(schema.lanes.insert(), {"lane": "last"})

    maria_db.write(work)
    assert len(runs) == 2
    assert runs[0] != runs[1]
    assert sorted(lane.lane for lane in rows(maria_db, schema.lanes)) == ["lane-1", "last"]


def test_all_connections_killed_at_once_cost_nothing(maria_db, mariadb, open_database):
    """As after a restart of the server: the pool is full of dead connections."""
    other = open_database(url_of(maria_db), db_pool_size=3)
    held = [other.engine.connect() for _ in range(3)]
    ids = [conn.execute(text("SELECT CONNECTION_ID()")).scalar() for conn in held]
    for conn in held:
        conn.close()
    for connection_id in ids:
        kill(mariadb, connection_id)
    assert submit_jobs(other, [new_job()], POLICY) == [Verdict.CREATED]
    assert submit_jobs(other, [new_job()], POLICY) == [Verdict.CREATED]


def kill(mariadb, connection_id):
    with mariadb.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"KILL CONNECTION {connection_id}")
        wait_until(lambda: not _alive(cursor, connection_id), what="the connection is gone")


def _alive(cursor, connection_id):
    cursor.execute("SELECT 1 FROM information_schema.processlist WHERE id = %s", (connection_id,))
    return cursor.fetchone()


def test_a_row_that_somebody_holds_is_waited_for(db):
    """F-32: an operator's session holds a row for a while; the worker's transaction waits, then succeeds."""
    hand = hire(db)
    (job_id,) = submit(db)
    answers = []
    with db.engine.connect() as operator:
        transaction = operator.begin()
        operator.execute(select(schema.jobs.c.job_id).where(schema.jobs.c.job_id == job_id).with_for_update())
        waiting = Thread(target=lambda: answers.append(hand.claim(job_id)), name="waiting-claim")
        waiting.start()
        waiting.join(0.3)
        assert answers == []
        transaction.rollback()
        waiting.join(20)
    assert answers[0][0].attempt == 1


def counting(runs: list[int], job_id: str):
    """Work that needs this row, and notes that it was begun."""

    def work(conn):
        runs.append(len(runs))
        conn.execute(update(schema.jobs).where(schema.jobs.c.job_id == job_id).values(priority=1))

    return work


@pytest.fixture
def hasty_db(maria_db, open_database):
    """Its sessions wait for a row for a second."""
    return open_database(maria_db.settings.database_url, worker_timeout_s=1.0)


class Pauses:
    """A clock on which nothing takes time but the pauses between two tries."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, _seconds):
        self.now += database.MOMENT_S / 3


def test_for_a_batch_a_held_row_is_waited_for_once_and_at_once_hardly_at_all(hasty_db, unhindered, monkeypatch):
    (job_id,) = submit(hasty_db)
    patiently: list[int] = []
    briefly: list[int] = []

    def try_for_a_moment():
        with pytest.raises(RowsHeld):
            hasty_db.write_batch(counting(briefly, job_id), Waiting.MOMENT)

    with holding_job(hasty_db, job_id):
        with pytest.raises(RowsHeld):
            hasty_db.write_batch(counting(patiently, job_id))
        with monkeypatch.context() as patched:
            patched.setattr(database, "time", Pauses())
            unhindered(try_for_a_moment)
    assert len(patiently) == 1
    assert 1 < len(briefly) < database.MAX_RUNS, "others hold rows for a moment: it tries again, and not for long"
    hasty_db.write_batch(counting(briefly, job_id), Waiting.MOMENT)
    assert row(hasty_db, job_id).priority == 1


@pytest.mark.parametrize("waiting", Waiting)
def test_held_rows_are_passed_over_however_long_the_others_are_waited_for(maria_db, waiting):
    """MariaDB fails such a statement where nothing may be waited for (1180), although it waits for nothing."""
    held, free = submit(maria_db, 2)
    some = select(schema.jobs.c.job_id).with_for_update(skip_locked=True)
    with holding_job(maria_db, held):
        assert maria_db.write_batch(lambda conn: conn.execute(some).scalars().all(), waiting) == [free]
        assert maria_db.write_batch(lambda conn: ownership.lock_unheld(conn, [held, free]), waiting) == [free]


def test_a_deadlock_is_no_wait_in_vain(db, faults, monkeypatch):
    """However long it took until then: a slow batch is run again, not taken apart."""
    monkeypatch.setattr(database, "ONE_WAIT_S", 0.0)
    (job_id,) = submit(db)
    runs: list[int] = []
    faults.inject(1213, 1213, pattern="UPDATE orchestrator_jobs")
    db.write_batch(counting(runs, job_id))
    assert len(runs) == 3


def test_a_held_row_is_no_broken_connection_however_long_workers_may_be_silent(maria_db, open_database):
    """Sessions wait for a row for a part of worker_timeout_s, and for an answer for db_timeout_s."""
    (job_id,) = submit(maria_db)
    runs: list[int] = []
    patient = open_database(maria_db.settings.database_url, worker_timeout_s=45.0, db_timeout_s=6.0)
    with holding_job(maria_db, job_id), pytest.raises(RowsHeld):
        patient.write_batch(counting(runs, job_id))
    assert len(runs) == 1


def test_many_jobs_of_an_agent_whose_account_is_held_are_refused_after_one_wait(hasty_db, monkeypatch):
    """Accounts of large batches are charged by a connection of its own."""
    submit(hasty_db, agent="held")
    many = [new_job(agent="held") for _ in range(MANY)]
    waits: list[Any] = []
    for engine in (hasty_db.engine, hasty_db._reader):
        event.listen(engine, "handle_error", lambda context: waits.append(context.original_exception.args[0]))
    with holding(hasty_db, schema.lane_accounts):
        with pytest.raises(RowsHeld):
            submit_jobs(hasty_db, many, POLICY)
        assert waits == [1205]
        monkeypatch.setattr(hasty_db, "write_apart", None)  # that connection would wait
        with pytest.raises(RowsHeld):
            submit_jobs(hasty_db, many, POLICY, waiting=Waiting.NOT)
    assert set(submit_jobs(hasty_db, many, POLICY, waiting=Waiting.NOT)) == {Verdict.CREATED}


def test_a_server_that_is_not_there_is_unavailable_at_once():
    absent = Database(Settings(database_url=f"mysql+pymysql://root@127.0.0.1:{free_port()}/x", db_timeout_s=2.0))
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1"):
        absent.ping()
    absent.close()


def slowly(runs, seconds=5):
    """A question that takes longer than any database may."""

    def ask(conn):
        runs.append(connection_id(conn))
        return conn.execute(text(f"SELECT SLEEP({seconds})")).scalar()

    return ask


def test_a_question_that_takes_too_long_is_asked_once(maria_db, open_database, monkeypatch):
    """It would take as long the next time; meanwhile its thread and its connection are nobody else's."""
    # The server ends it long before the connection is given up: its answer has time to arrive.
    monkeypatch.setattr("orchestrator.store.dialect.mariadb.MariaDB.OF_THE_LIMIT", 0.05)
    impatient = open_database(url_of(maria_db), db_timeout_s=10.0)
    runs: list[Any] = []
    with pytest.raises(TookTooLong):
        impatient.read(slowly(runs, 60))
    assert len(runs) == 1
    mine = text("SELECT count(*) FROM information_schema.processlist WHERE id = :id AND info LIKE '%SLEEP%'")
    goes_on = lambda: maria_db.read(lambda conn: conn.execute(mine, {"id": runs[0]}).scalar())
    wait_until(lambda: not goes_on(), timeout=20, what="its end in the server")
    assert impatient.read(connection_id) in runs, "its connection is as good as before"


def test_what_is_in_a_transaction_may_take_as_long_as_it_takes(maria_db):
    limit = text("SELECT @@SESSION.max_statement_time")
    assert maria_db.write(lambda conn: conn.execute(limit).scalar()) == 0
    with dialect_of(url_of(maria_db)).migration_lock(maria_db.engine) as conn:
        assert conn.execute(limit).scalar() == 0
    assert 0 < maria_db.read(lambda conn: conn.execute(limit).scalar()) < maria_db.settings.db_timeout_s


def test_a_server_that_stalls_holds_up_a_read_for_one_time_limit(maria_db, mariadb, open_database):
    """Also who connects, and hears nothing."""
    with Proxy(mariadb.port) as proxy:
        impatient = open_database(url_of(maria_db).replace(f":{mariadb.port}/", f":{proxy.port}/"), db_timeout_s=2.0)
        accepted = lambda count: proxy.accepted >= count
        impatient.ping()
        proxy.stall()
        for connections in (1, 2):
            with pytest.raises(DatabaseUnavailable):
                impatient.ping()
            wait_until(partial(accepted, connections), what="the proxy accepts it")
            assert proxy.accepted == connections
        proxy.heal()
        impatient.ping()


def test_a_read_whose_connections_are_dead_is_asked_again(maria_db, mariadb, open_database):
    with Proxy(mariadb.port) as proxy:
        other = open_database(url_of(maria_db).replace(f":{mariadb.port}/", f":{proxy.port}/"))
        other.ping()
        proxy.cut()
        other.ping()
        assert proxy.accepted == 2
        proxy.lose_reply()
        other.ping()
        assert proxy.accepted == 3


@pytest.mark.parametrize("apart", [False, True])
def test_a_write_that_got_no_answer_in_time_is_run_again(maria_db, open_database, apart):
    """As after any other break: nobody knows what became of it, and it finds its own traces."""
    impatient = open_database(url_of(maria_db), db_timeout_s=2.0)
    runs: list[Any] = []

    def work(conn):
        if not runs:
            return slowly(runs)(conn)
        return connection_id(conn)

    written = impatient.write(lambda conn: impatient.write_apart(conn, work) if apart else work(conn))
    assert apart or written not in runs
    assert len(runs) == 1


def url_of(db):
    return str(db.engine.url.render_as_string(hide_password=False))


def test_a_server_that_restarts_is_found_again(private_server, settings):
    """F-22: kill -9 between two submits; what was committed is there, and nobody has to reconnect by hand."""
    server = private_server(MariaDB)
    opened = Database(settings(database_url=server.url))
    make_tables(opened.engine)
    submit(opened, job_id="before")
    server.kill()
    with pytest.raises(DatabaseUnavailable):
        submit(opened, job_id="meanwhile")
    server.start()
    submit(opened, job_id="after")
    assert sorted(job.job_id for job in rows(opened, schema.jobs)) == ["after", "before"]
    opened.close()


def look_twice(db):
    """Work that sees a job's status, and again when somebody else has claimed it."""
    (job_id,) = submit(db)
    hand = hire(db)

    def work(conn):
        query = select(schema.jobs.c.status).where(schema.jobs.c.job_id == job_id)
        first = conn.execute(query).scalar()
        hand.claim(job_id)
        return first, conn.execute(query).scalar()

    return work


def test_reads_take_no_locks_and_hold_no_snapshot(db):
    assert db.read(look_twice(db)) == ("pending", "claimed")


def test_a_transaction_sees_what_others_committed_since_it_began(maria_db):
    """READ COMMITTED: nobody decides by a picture of the past."""
    assert maria_db.write(look_twice(maria_db)) == ("pending", "claimed")


def test_a_transaction_holds_the_rows_that_it_found_and_not_the_room_between_them(maria_db, beside):
    """READ COMMITTED: who looks at a queue keeps nobody from joining it."""
    add = lambda conn, *names: conn.execute(schema.lanes.insert(), [{"lane": name} for name in names])
    maria_db.write(lambda conn: add(conn, "a", "c"))
    queue = select(schema.lanes).where(schema.lanes.c.lane >= "a").with_for_update()
    beside(lambda conn: conn.execute(queue).all(), lambda: maria_db.write_at_once(lambda conn: add(conn, "b", "d")))
    assert len(rows(maria_db, schema.lanes)) == 4


def connection_id(conn):
    return conn.execute(text("SELECT connection_id()")).scalar_one()


def test_a_connection_that_breaks_among_gathered_events_is_replaced_and_the_work_done_again(maria_db, mariadb):
    runs = []

    def work(conn):
        runs.append(connection_id(conn))
        with audit.together(conn):
            audit.record(conn, [audit.Event("test.event")])
            if len(runs) == 1:
                kill(mariadb, runs[0])
            conn.execute(text("SELECT 1"))

    maria_db.write(work)
    assert len(set(runs)) == 2
    assert [row.event_type for row in rows(maria_db, schema.audit)] == ["test.event"]


@pytest.mark.parametrize("code", [1290, 1792, 1836])
def test_connections_to_a_server_that_became_read_only_are_left(maria_db, code):
    """After a failover the name leads to the new primary, and an open connection to the old one for ever."""
    seen = set()

    def refused(conn):
        seen.add(connection_id(conn))
        conn.execute(text(f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}, MESSAGE_TEXT = 'read-only'"))

    with pytest.raises(DatabaseUnavailable):
        maria_db.write(refused)
    assert maria_db.write(connection_id) not in seen


def test_a_row_that_a_check_refuses_is_an_error_of_its_content(db):
    """MariaDB calls it trouble of the server; a worker would then try to write it for ever."""
    (job_id,) = submit(db)
    with pytest.raises(database.CONTENT_ERRORS):
        db.write(lambda conn: conn.execute(update(schema.jobs).values(attempts=7)))
    assert row(db, job_id).attempts == 0


def test_a_read_is_one_round_trip(maria_db, open_database):
    """Nothing is rolled back after a statement that stands alone."""
    alone = open_database(url_of(maria_db))  # one connection for all of it

    def looks(conn):
        told = conn.execute(
            text(
                "SELECT CONNECTION_ID(), (SELECT VARIABLE_VALUE FROM information_schema.session_status"
                " WHERE VARIABLE_NAME = 'COM_ROLLBACK')"
            )
        )
        return tuple(told.one())

    before = alone.read(looks)
    for _ in range(3):
        alone.read(lambda conn: conn.execute(select(schema.jobs.c.job_id)).all())
    assert alone.read(looks) == before
