"""Values in statements: written as the driver writes them, and read back as they were."""

from datetime import UTC, datetime
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymysql.connections import Connection
from pymysql.constants import SERVER_STATUS
from pymysql.err import OperationalError
from sqlalchemy import text
from sqlalchemy.exc import DataError

from orchestrator.cli import doctor, versions
from orchestrator.cli.schema import opened, packet_problem
from orchestrator.errors import PayloadTooLarge, ServerTooOld
from orchestrator.store.database import Database
from orchestrator.store.dialect.driver import QuickConnection
from orchestrator.store.dialect.mariadb import MariaDB
from orchestrator.store.submit import Verdict, submit_jobs
from tests.factories import POLICY, new_job


class Colour(StrEnum):
    RED = "it's red"


def unconnected(status=0):
    connection = QuickConnection(defer_connect=True)
    connection.server_status = status
    return connection


TRICKY = ["", "plain", "O'Brien", 'a "quote"', "back\\slash", "\\' OR 1=1 -- ", "nul\0", "\n\r\x1a", "%s %% ä€😀"]
OTHERS = [0, -(2**63), True, None, 0.5, 1e300, b"\0'", datetime(2026, 1, 2, 3, 4, 5, 6, UTC), Colour.RED, (1, "a'b")]
STATUSES = [0, SERVER_STATUS.SERVER_STATUS_NO_BACKSLASH_ESCAPES]


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("value", [*TRICKY, *OTHERS], ids=repr)
def test_values_are_written_as_the_driver_writes_them(value, status):
    quick = unconnected(status)
    assert quick.escape(value) == Connection.escape(quick, value)


@given(st.one_of(st.text(), st.integers()), st.sampled_from(STATUSES))
def test_any_text_is_written_as_the_driver_writes_it(value, status):
    quick = unconnected(status)
    assert quick.escape(value) == Connection.escape(quick, value)


@pytest.mark.parametrize("mode", ["", "NO_BACKSLASH_ESCAPES", "ANSI_QUOTES"])
def test_values_come_back_as_they_were(maria_db, mode):
    with maria_db.engine.connect() as conn:
        assert isinstance(conn.connection.driver_connection, QuickConnection)
        conn.execute(text("SET sql_mode = :mode"), {"mode": mode})
        for value in TRICKY:
            assert conn.execute(text("SELECT :value"), {"value": value}).scalar() == value
        conn.invalidate()  # the mode is the connection's


@pytest.fixture
def server_mode(mariadb):
    """`server_mode(MODES)`: what sessions have that say nothing of their own."""
    with mariadb.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT @@GLOBAL.sql_mode")
        (usual,) = cursor.fetchone()
        yield lambda mode: cursor.execute("SET GLOBAL sql_mode = %s", (mode,))
        cursor.execute("SET GLOBAL sql_mode = %s", (usual,))


def put_into_three_letters(conn, value):
    conn.exec_driver_sql("CREATE TEMPORARY TABLE IF NOT EXISTS narrow (name VARCHAR(3))")
    conn.exec_driver_sql(f"INSERT INTO narrow VALUES ('{value}')")


def test_what_does_not_fit_is_refused_whatever_the_server_is_used_to(server_mode, mariadb, maria_db, open_database):
    """Without strict mode it is cut, and an id becomes another's."""
    server_mode("")
    with mariadb.connect() as theirs, theirs.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE orchestrator_tests.narrow (name VARCHAR(3))")
        cursor.execute("INSERT INTO orchestrator_tests.narrow VALUES ('longer')")  # so it would go
    db = open_database(maria_db.settings.database_url)

    def while_migrating(work):
        with db._dialect.migration_lock(db.engine) as conn:
            work(conn)

    for session in (db.write, db.read, while_migrating):
        session(lambda conn: put_into_three_letters(conn, "fit"))
        with pytest.raises(DataError, match="too long"):
            session(lambda conn: put_into_three_letters(conn, "longer"))


def test_other_modes_stay_what_the_server_says(server_mode, maria_db, open_database):
    """The library asks for them at its first connection, and writes statements accordingly."""
    server_mode("ANSI_QUOTES,NO_BACKSLASH_ESCAPES")
    db = open_database(maria_db.settings.database_url)
    modes = db.read(lambda conn: conn.execute(text("SELECT @@sql_mode")).scalar()).split(",")
    assert sorted(modes) == ["ANSI_QUOTES", "NO_BACKSLASH_ESCAPES", "NO_ENGINE_SUBSTITUTION", "STRICT_TRANS_TABLES"]


def test_a_database_too_old_for_our_sessions_is_told_by_its_version(mariadb_url, open_database, monkeypatch):
    """MariaDB 10.2 and MySQL do not know all that a session is told."""
    monkeypatch.setattr(MariaDB, "MODES", "NO_SUCH_MODE")
    assert versions.of_database(open_database(mariadb_url)).new_enough
    monkeypatch.setitem(versions.OLDEST, "mysql", ("MariaDB", (99, 0)))
    with pytest.raises(ServerTooOld, match=r"has version 1\d\.\d+.*needs MariaDB 99.0 or later"):
        versions.require_database(open_database(mariadb_url))


def test_without_an_authority_it_encrypts_as_the_driver_does_and_reads_none():
    quick = unconnected()
    theirs = Connection._create_ssl_ctx(quick, {})
    for name in ("check_hostname", "verify_mode", "minimum_version", "maximum_version", "options", "protocol"):
        assert getattr(quick.ctx, name) == getattr(theirs, name), name
    assert (quick.ssl, quick._ssl_required) == (True, False)
    assert quick.ctx is unconnected().ctx
    assert quick.ctx.cert_store_stats()["x509_ca"] == 0


def test_an_authority_that_is_named_is_checked():
    with pytest.raises(OperationalError, match=r"2026, 'ssl_ca=/no/such/authority.pem: .*No such file"):
        QuickConnection(defer_connect=True, ssl_ca="/no/such/authority.pem", ssl_verify_cert=True)


# --- statements that are too large ---


@pytest.fixture
def small(maria_db, mariadb):
    with mariadb.taking(1 << 20):
        db = Database(maria_db.settings)
        yield db
        db.close()


@pytest.mark.parametrize("size", [(1 << 20) - 2, (1 << 20) - 1, 1 << 20, 3 << 20])
def test_a_statement_is_refused_before_the_server_would_end_the_connection(small, size):
    shell = len("SELECT LENGTH('')")

    def ask(conn):
        return conn.exec_driver_sql(f"SELECT LENGTH('{'a' * (size - shell)}')").scalar()

    if size < (1 << 20) - 1:
        assert small.write(ask) == size - shell
    else:
        with pytest.raises(PayloadTooLarge, match="raise its max_allowed_packet"):
            small.write(ask)
    assert small.largest_statement() == 1 << 20


def test_rows_that_fit_by_themselves_are_written_although_all_together_would_not(small):
    jobs = [new_job(payload={"text": "a" * 600_000}) for _ in range(4)]
    assert set(submit_jobs(small, jobs, POLICY)) == {Verdict.CREATED}


def test_a_server_that_takes_less_than_a_payload_may_need_is_told_of(small):
    enough = small.settings.model_copy(update={"payload_max_bytes": 100_000})
    with opened(enough) as db:
        assert packet_problem(db) is None
    assert "lower payload_max_bytes" in (packet_problem(small) or "")
    findings = {found.check: found for found in doctor.examine(small.settings)}
    assert not findings["max-allowed-packet"].ok
