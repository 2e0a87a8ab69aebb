"""checks of columns: where a job waits, how a lease ends, what is done to a workflow, how a GPU is, who runs a pool.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from alembic.util import CommandError

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


#: Table, column, its definition, the values that mean something.
CHECKS = (
    ("orchestrator_jobs", "queued", "VARCHAR(10) DEFAULT 'ready'", "'delayed', 'ready', 'announced', 'blocked'"),
    ("workflows", "sweep", "VARCHAR(8)", "'pending', 'all', 'retry', 'forget'"),
    ("orchestrator_leases", "ending_as", "VARCHAR(8)", "'released', 'expired', 'spent'"),
    ("gpus", "health", "VARCHAR(16) NOT NULL DEFAULT 'ok'", "'ok', 'unhealthy', 'lost', 'unknown'"),
    ("worker_pools", "provider", "VARCHAR(16) NOT NULL DEFAULT 'local'", "'local', 'external', 'kubernetes'"),
)


def upgrade() -> None:
    for table, column, _, values in CHECKS:
        refuse_others(table, column, values)
    for table, column, definition, values in CHECKS:
        check(table, column, definition, values)


def refuse_others(table: str, column: str, values: str) -> None:
    """MariaDB looks at no row that is there: one with another value could be neither changed nor ended from then on."""
    others = f"SELECT {column} FROM {table} WHERE {column} NOT IN ({values}) LIMIT 1"  # noqa: S608 - names of ours
    found = op.get_bind().execute(sa.text(others)).scalar()
    if found is not None:
        raise CommandError(
            f"a row of {table} has {column} = {found!r}, which means nothing: make it {values}, and migrate again"
        )


def check(table: str, column: str, definition: str, values: str) -> None:
    rule = f"CHECK ({column} IN ({values}))"
    if op.get_context().dialect.name == "sqlite":
        make_anew(table, rule)
    else:  # a check of the table would have MariaDB copy all rows while nobody can write
        op.execute(f"ALTER TABLE {table} MODIFY {column} {definition} {rule}")


def make_anew(table: str, rule: str) -> None:
    """SQLite adds a check to no table that is there."""
    conn = op.get_bind()
    texts = sa.text("SELECT sql FROM sqlite_master WHERE tbl_name = :table AND type = :type AND sql IS NOT NULL")
    made = conn.execute(texts, {"table": table, "type": "table"}).scalar_one()
    indexes = conn.execute(texts, {"table": table, "type": "index"}).scalars().all()
    op.execute(f"ALTER TABLE {table} RENAME TO without_check")
    conn.exec_driver_sql(f"{made.rstrip().removesuffix(')')},\n\t{rule}\n)")
    op.execute(f"INSERT INTO {table} SELECT * FROM without_check")  # noqa: S608 - a name of ours
    op.execute("DROP TABLE without_check")
    for index in indexes:
        conn.exec_driver_sql(index)
