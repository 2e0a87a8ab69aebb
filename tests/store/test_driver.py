"""Values in statements: written as the driver writes them, and read back as they were."""

from datetime import UTC, datetime
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymysql.connections import Connection
from pymysql.constants import SERVER_STATUS
from sqlalchemy import text

from orchestrator.store.driver import QuickConnection


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


def test_without_an_authority_it_encrypts_as_the_driver_does_and_reads_none():
    quick = unconnected()
    theirs = Connection._create_ssl_ctx(quick, {})
    for name in ("check_hostname", "verify_mode", "minimum_version", "maximum_version", "options", "protocol"):
        assert getattr(quick.ctx, name) == getattr(theirs, name), name
    assert (quick.ssl, quick._ssl_required) == (True, False)
    assert quick.ctx is unconnected().ctx
    assert quick.ctx.cert_store_stats()["x509_ca"] == 0


def test_an_authority_that_is_named_is_checked():
    with pytest.raises(FileNotFoundError):
        QuickConnection(defer_connect=True, ssl_ca="/no/such/authority.pem", ssl_verify_cert=True)
