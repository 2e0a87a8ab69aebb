"""Moments are UTC, whatever the time zone of the server and of the session; the servers of tests have another."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import literal, select, text

from orchestrator.store.dialect import clock, seconds_since, utc_now, utc_shift

#: Far less than the shortest step between time zones, which is a quarter of an hour.
NEAR_S = 60


def utc():
    return datetime.now(UTC).replace(tzinfo=None)


def check_moments(conn):
    moments = [clock(conn), *conn.execute(select(utc_now(), utc_shift(0.0))).one()]
    assert [abs((datetime.fromisoformat(str(m)) - utc()).total_seconds()) < NEAR_S for m in moments] == [True] * 3
    assert abs(float(conn.execute(select(seconds_since(literal(utc())))).scalar_one())) < NEAR_S


def test_the_databases_clock_is_utc(db):
    db.read(check_moments)


@pytest.mark.parametrize("zone", ["+05:30", "-11:00"])
def test_it_is_utc_in_a_session_of_another_zone_too(maria_db, zone):
    with maria_db.engine.connect() as conn:
        conn.execute(text("SET time_zone = :zone"), {"zone": zone})
        check_moments(conn)
        conn.invalidate()  # the zone is the connection's


def test_what_a_statement_calls_now_is_utc_in_our_sessions(maria_db):
    assert maria_db.read(lambda conn: conn.execute(text("SELECT @@global.time_zone")).scalar()) == "+05:30"
    now = maria_db.read(lambda conn: conn.execute(text("SELECT now(6)")).scalar_one())
    assert abs((now - utc()).total_seconds()) < NEAR_S
