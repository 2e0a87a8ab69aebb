"""worker registry.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

KIND = "kind VARCHAR(8) DEFAULT 'process' NOT NULL"
CHECK = "CONSTRAINT ck_workers_kind CHECK (kind IN ('process', 'http'))"


def upgrade() -> None:
    known = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("workers")}
    if "version" not in known:
        op.add_column("workers", sa.Column("version", sa.String(length=64), nullable=True))
    if "kind" not in known:
        # One statement each, so that a migration killed half-way never leaves the column without its check. SQLite
        # takes a check only with its column, MariaDB a name only for a check beside it.
        separator = "" if op.get_bind().dialect.name == "sqlite" else ", ADD"
        op.execute(f"ALTER TABLE workers ADD COLUMN {KIND}{separator} {CHECK}")
