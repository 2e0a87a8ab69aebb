"""The tables as migrations make them (tests/store/test_migrations.py compares the two), in a fraction of the time."""

from sqlalchemy import Engine, text

from orchestrator.store import revisions, schema


def make_tables(engine: Engine) -> None:
    schema.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        connection.execute(text("DELETE FROM alembic_version"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": revisions.head()})
