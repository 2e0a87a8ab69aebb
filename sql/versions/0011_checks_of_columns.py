"""checks of columns: where a job waits, how a lease ends, what is done to a workflow, how a GPU is, who runs a pool.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    check("orchestrator_jobs", "queued", "VARCHAR(10) DEFAULT 'ready'", "'delayed', 'ready', 'announced', 'blocked'")
    check("workflows", "sweep", "VARCHAR(8)", "'pending', 'all', 'retry', 'forget'")
    check("orchestrator_leases", "ending_as", "VARCHAR(8)", "'released', 'expired', 'spent'")
    check("gpus", "health", "VARCHAR(16) NOT NULL DEFAULT 'ok'", "'ok', 'unhealthy', 'lost', 'unknown'")
    check("worker_pools", "provider", "VARCHAR(16) NOT NULL DEFAULT 'local'", "'local', 'external', 'kubernetes'")


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
