"""A connection that died in silence is left for another; a server that is slow is waited for, and asked once."""

import threading
import time
from typing import Any

import pytest
from sqlalchemy import text

from orchestrator.errors import DatabaseUnavailable
from orchestrator.store.database import Database
from orchestrator.store.dialect.vigil import Question
from tests.proxy import Proxy
from tests.waiting import wait_until

#: Seconds without an answer after which the server is asked about it.
SILENCE_S = 0.4
DIED = "died in silence"


@pytest.fixture
def proxy(mariadb):
    with Proxy(mariadb.port) as opened:
        yield opened


@pytest.fixture
def far(mariadb, mariadb_url, proxy, settings):
    """`far(db_timeout_s=…)`: a watched database behind the proxy, whose answers may take longer than any test."""
    opened = []

    def start(**given):
        url = mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        chosen = settings(database_url=url, db_pool_size=2, **({"db_timeout_s": 600.0} | given))
        opened.append(Database(chosen, again_when_late=False, silence_s=SILENCE_S))
        return opened[-1]

    yield start
    for db in opened:
        db.close()


class Asked:
    """Takes the database so many seconds; counts how often it was asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.times = seconds, 0

    def __call__(self, conn):
        self.times += 1
        return conn.execute(text(f"SELECT SLEEP({self.seconds})")).scalar_one()


@pytest.mark.parametrize("how", ["write", "write_at_once"])
def test_a_server_that_is_slow_is_waited_for_and_asked_once(far, proxy, how, caplog):
    """Whoever asked again would find the rows held by its own first question, and be declared dead for that."""
    db = far()
    asked = Asked(3 * SILENCE_S)
    assert getattr(db, how)(asked) == 0
    assert asked.times == 1
    assert proxy.accepted > 1, "nobody asked about it"
    assert DIED not in caplog.text


def test_a_connection_that_died_in_silence_is_left_for_another(far, proxy, caplog):
    db, asked = far(), Asked()
    db.write(asked)
    proxy.strand()
    assert db.write(asked) == 0
    assert asked.times == 3
    assert DIED in caplog.text


def test_an_answer_that_got_lost_is_asked_for_again(far, proxy):
    db, asked = far(), Asked()
    db.write(asked)
    proxy.swallow_replies()
    waits = threading.Thread(target=db.write, args=(asked,), daemon=True)
    waits.start()
    wait_until(lambda: proxy.swallowed, what="an answer that got lost")
    proxy.heal()
    waits.join(30)
    assert not waits.is_alive()


def test_a_commit_without_an_answer_is_no_end(far, proxy, mariadb_with_tables):
    db, times = far(), []

    def work(conn):
        times.append(conn.execute(text("SELECT 1")).scalar_one())
        if len(times) == 1:
            proxy.strand()

    db.write(work)
    assert times == [1, 1]


def test_connections_that_died_together_cost_one_silence(far, proxy, caplog):
    db = far()
    meet = threading.Barrier(2)
    both = [threading.Thread(target=db.write, args=(lambda _conn: meet.wait(10),)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(30)
    proxy.strand()
    db.write(Asked())
    assert caplog.text.count(DIED) == 1


def test_the_connection_that_asks_cannot_have_died_with_the_others(far, proxy):
    db = far()
    db.write(Asked(2 * SILENCE_S))
    assert proxy.accepted > 1, "nobody asked about it"
    proxy.strand()
    assert db.write(Asked()) == 0


def test_where_the_server_cannot_be_asked_everything_takes_as_long_as_it_may(far, proxy, caplog):
    db, asked = far(db_timeout_s=4 * SILENCE_S), Asked()
    db.write(asked)
    proxy.stall()
    with pytest.raises(DatabaseUnavailable):
        db.write(asked)
    assert asked.times == 2
    assert DIED not in caplog.text


def test_whoever_has_its_answer_meanwhile_keeps_its_connection(far, caplog):
    """As after a halt of the process: the answer was there long ago, and nobody was awake to read it."""
    db, asked = far(), Asked()
    vigil: Any = db._vigil

    def work(conn):
        asked(conn)
        old = Question(conn.connection.dbapi_connection, time.monotonic() - 60)
        vigil._look(threading.get_ident(), old)
        return asked(conn)

    assert db.write(work) == 0
    assert asked.times == 2
    assert DIED not in caplog.text


def test_a_session_that_has_ended_is_not_at_work(far, mariadb):
    """As its server ends those whose transactions idle: nobody on the other side of a dead line hears of it."""
    db = far()
    vigil: Any = db._vigil
    with db.engine.connect() as conn, mariadb.connect() as other, other.cursor() as cursor:
        connection: Any = conn.connection.dbapi_connection
        cursor.execute(f"KILL {connection.thread_id()}")
        listed = f"SELECT 1 FROM information_schema.processlist WHERE id = {connection.thread_id()}"
        wait_until(lambda: not cursor.execute(listed), what="the end of the session")
        assert not vigil._at_work(connection)
        conn.invalidate()


def test_a_file_is_never_silent(settings, tmp_path):
    db = Database(settings(database_url=f"sqlite:///{tmp_path / 'x.db'}"), silence_s=SILENCE_S)
    assert db.write(lambda conn: conn.execute(text("SELECT 1")).scalar_one()) == 1
    assert db._vigil is None
    db.close()


def test_it_ends_with_its_database(far):
    db = far()
    db.write(Asked())
    db.close()
    assert not db._vigil._thread.is_alive()
    assert not db._vigil._questions
