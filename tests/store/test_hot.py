"""Hot statements: the driver executes them, and everything else is as if SQLAlchemy had."""

from datetime import datetime

import pytest
from sqlalchemy import event, select, update
from sqlalchemy.exc import DBAPIError

from orchestrator.store import schema
from orchestrator.store.hot import Hot, insert_rows
from tests.factories import row, rows, submit, traffic

NOTE = Hot(
    lambda ids: update(schema.jobs).where(schema.jobs.c.job_id.in_(ids)).values(wait_reason="noted", updated_at=None)
)
BY_ID = Hot(lambda ids: select(schema.jobs.c.job_id, schema.jobs.c.created_at).where(schema.jobs.c.job_id.in_(ids)))


def test_a_write_tells_how_many_rows_it_matched_even_if_nothing_changes(db):
    (job_id,) = submit(db)
    for _ in range(2):
        assert db.write(lambda conn: NOTE.run(conn, [job_id, "unknown"])) == 1


def test_found_columns_have_the_types_of_the_schema(db):
    ids = submit(db, count=3)
    found = db.read(lambda conn: BY_ID.rows(conn, ids))
    assert {tuple(one) for one in found} == {(job_id, row(db, job_id).created_at) for job_id in ids}


def test_listeners_hear_of_every_statement(db):
    with traffic(db) as seen:
        db.write(lambda conn: NOTE.run(conn, ["a"]))
        db.write(lambda conn: insert_rows(conn, schema.lanes, [{"lane": "heard"}]))
    assert [statement.split()[0] for statement in seen.statements if not statement.startswith("BEGIN")] == [
        "UPDATE",
        "INSERT",
    ]


def test_an_error_of_the_driver_names_the_statement_and_leaves_the_connection_usable(db):
    lane = [{"lane": "twice"}]
    with db.engine.connect() as conn, conn.begin():
        insert_rows(conn, schema.lanes, lane)
        with pytest.raises(DBAPIError, match="INSERT INTO lanes") as refused:
            insert_rows(conn, schema.lanes, lane)
        assert not refused.value.connection_invalidated
        assert conn.execute(select(schema.lanes.c.lane)).scalars().all() == ["twice"]


def test_a_broken_connection_is_left_at_once(maria_db):
    with maria_db.engine.connect() as conn:
        with pytest.raises(DBAPIError) as broken, conn.begin():
            conn.connection.driver_connection._force_close()
            NOTE.run(conn, ["a"])
        assert broken.value.connection_invalidated


def test_an_error_that_is_not_the_drivers_stays_what_it_is(db):
    def refuse(_cursor, _statement, _parameters, _context):
        raise UnicodeError("unfit")

    event.listen(db.engine, "do_execute", refuse)
    try:
        with pytest.raises(UnicodeError, match=r"^unfit$"):
            db.write(lambda conn: NOTE.run(conn, ["a"]))
    finally:
        event.remove(db.engine, "do_execute", refuse)


@pytest.mark.parametrize("value", ["plain", "100 % sure, %s %d", 'it\'s \\ "quoted"', "", "ä€😀", None])
def test_what_many_rows_have_in_common_is_stored_in_each(db, value):
    events = [{"event_type": "shared", "job_id": f"j-{n}", "actor": value} for n in range(20)]
    db.write(lambda conn: insert_rows(conn, schema.audit, events))
    assert {(one.job_id, one.actor) for one in rows(db, schema.audit)} == {(f"j-{n}", value) for n in range(20)}


def test_many_rows_that_are_all_the_same_are_as_many(db):
    db.write(lambda conn: insert_rows(conn, schema.audit, [{"event_type": "100 %"}] * 20))
    assert [one.event_type for one in rows(db, schema.audit)] == ["100 %"] * 20


def test_what_many_rows_have_in_common_is_written_once(maria_db):
    moment = datetime(2026, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001 - as the schema has them
    lanes = [{"lane": f"lane-{n}", "created_at": moment} for n in range(10)]
    with traffic(maria_db) as seen:
        maria_db.write(lambda conn: insert_rows(conn, schema.lanes, lanes))
    (insert,) = [statement for statement in seen.statements if statement.startswith("INSERT")]
    assert insert.count("%s") == 10
    assert {one.created_at for one in rows(maria_db, schema.lanes)} == {moment}
