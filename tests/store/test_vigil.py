"""A connection that died in silence is left for another; a server that is slow is waited for, and asked once."""

import socket
import threading
import time
from typing import Any, cast

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from orchestrator.errors import DatabaseUnavailable
from orchestrator.store.database import Database
from orchestrator.store.dialect.driver import WatchedConnection
from tests.proxy import Proxy
from tests.servers import MariaDB
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


def test_a_rollback_without_an_answer_is_no_end(far, proxy):
    db, asked = far(), Asked()

    def work(conn):
        asked(conn)
        if asked.times == 1:
            proxy.strand()
        raise ValueError("a reason of its own")

    with pytest.raises(ValueError, match="of its own"):
        db.write(work)
    assert asked.times == 2


def test_another_server_at_that_address_knows_nothing_of_the_session(far, proxy, private_server, caplog):
    """There it has no such session, or that of somebody else: a connection that is well must not be cut for it."""
    db, asked = far(), Asked(4 * SILENCE_S)
    db.write(Asked())
    other = private_server(MariaDB)
    before, proxy.target = proxy.accepted, other.port
    with other.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS orchestrator_tests")
    assert db.write(asked) == 0
    assert asked.times == 1
    assert proxy.accepted > before, "nobody asked about it"
    assert DIED not in caplog.text


class Look:
    """A connection that has waited for long, and what comes of a look at it; its session sleeps."""

    def __init__(self, db: Database) -> None:
        self.vigil = cast("Any", db._vigil)
        self.vigil._stop.set()  # nobody else looks
        self.vigil._thread.join()
        self.held = db.engine.connect()
        self.connection: Any = self.held.connection.dbapi_connection
        self.waits()

    def waits(self) -> None:
        self.connection.opened_at = self.connection.asked_at = time.monotonic() - 60

    def cuts(self) -> bool:
        self.vigil._look(self.connection)
        self.connection.asked_at = None
        try:
            return bool(self.held.execute(text("SELECT 1")).scalar_one() != 1)
        except DBAPIError:
            return True


@pytest.fixture
def look(far):
    opened = Look(far())
    yield opened
    opened.held.close()


def test_a_look_cuts_who_waits_for_long_and_whose_session_sleeps(look):
    assert look.cuts()


def test_who_does_not_wait_is_left_alone(look):
    look.connection.asked_at = None
    assert not look.cuts()


def test_whoever_has_its_answer_meanwhile_keeps_its_connection(look, monkeypatch):
    """As after a halt of the process: the answer was there long ago, and nobody was awake to read it."""

    def asks(connection):
        connection.asked_at = None
        return False

    monkeypatch.setattr(look.vigil, "_at_work", asks)
    assert not look.cuts()


def test_after_a_cut_a_fresh_connection_is_trusted(look):
    """A server may be slow in ways that it does not tell: whoever asks again and again never hears its answer."""
    now = time.monotonic()
    look.vigil._cut_at, look.connection.opened_at = now - 2, now - 1
    assert not look.cuts()
    look.connection.asked_at = now - 60
    look.vigil._cut_at, look.connection.opened_at = now - 1000, now - 999
    assert look.cuts()


def test_a_look_that_told_nothing_is_repeated_at_once(look, monkeypatch, caplog):
    monkeypatch.setattr(look.vigil, "_others", create_engine("mysql+pymysql://root@127.0.0.1:1/x"))
    look.vigil._look(look.connection)
    assert "connection unknown" in caplog.text
    monkeypatch.undo()
    assert look.cuts()


def test_a_server_at_work_is_asked_about_it_no_more_often_than_needed(look, monkeypatch):
    answers = iter([True])
    monkeypatch.setattr(look.vigil, "_at_work", lambda _connection: next(answers))
    look.vigil._look(look.connection)
    look.vigil._look(look.connection)
    assert not list(answers)


def test_what_still_moves_towards_the_server_is_not_silent():
    """The server shows a session that reads a large statement as one that sleeps."""
    ours, theirs = socket.socketpair()
    connection: Any = WatchedConnection(defer_connect=True)
    connection._sock = ours
    with ours, theirs:
        assert not connection.sends()
        ours.send(b"x" * 1000)
        ours.send(b"y" * 1000)
        assert connection.sends(), "something is on its way, and nobody knows for how long"
        assert not connection.sends(), "and does not get on"
        theirs.recv(1000)
        assert connection.sends()
        theirs.recv(1000)
        assert not connection.sends()
    connection._sock = None
    assert not connection.sends()


def test_who_still_asks_is_not_cut(look, monkeypatch):
    monkeypatch.setattr(look.connection, "sends", lambda: True)
    assert not look.cuts()


def test_a_session_that_has_ended_is_not_at_work(look, mariadb):
    """As its server ends those whose transactions idle: nobody on the other side of a dead line hears of it."""
    with mariadb.connect() as other, other.cursor() as cursor:
        cursor.execute(f"KILL {look.connection.session}")
        listed = f"SELECT 1 FROM information_schema.processlist WHERE id = {look.connection.session}"
        wait_until(lambda: not cursor.execute(listed), what="the end of the session")
    assert look.vigil._at_work(look.connection) is False
    look.held.invalidate()


def test_no_look_ends_the_vigil(far, proxy, monkeypatch, caplog):
    db, asked = far(), Asked()
    vigil: Any = db._vigil
    right, bugs = vigil._look, iter([RuntimeError("a bug")])

    def breaks_once(connection):
        for bug in bugs:
            raise bug
        right(connection)

    monkeypatch.setattr(vigil, "_look", breaks_once)
    db.write(asked)
    proxy.strand()
    assert db.write(asked) == 0
    assert "vigil broke" in caplog.text


def test_a_file_is_never_silent(settings, tmp_path):
    db = Database(settings(database_url=f"sqlite:///{tmp_path / 'x.db'}"), silence_s=SILENCE_S)
    assert db.write(lambda conn: conn.execute(text("SELECT 1")).scalar_one()) == 1
    assert db._vigil is None
    db.close()


def test_it_ends_with_its_database(far):
    db = far()
    db.write(Asked(2 * SILENCE_S))
    db.close()
    vigil: Any = db._vigil
    assert not vigil._thread.is_alive()
    assert vigil._others.pool.checkedin() == 0
