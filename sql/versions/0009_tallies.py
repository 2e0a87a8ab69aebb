"""tallies: totals of what happened to jobs, counted from the audit trail; when a job last became ready.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TABLE_OPTIONS = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    # A migration killed half-way may have added it: MariaDB commits each change by itself.
    if "ready_at" not in {known["name"] for known in sa.inspect(op.get_bind()).get_columns("orchestrator_jobs")}:
        op.add_column("orchestrator_jobs", sa.Column("ready_at", UTC_DATETIME, nullable=True))
    op.create_table(
        "tallies",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("label", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("name", "type", "label"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_table(
        "tally_cursor",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("holes", LONG_TEXT, nullable=False),
        sa.CheckConstraint("json_valid(holes)", name="ck_tally_cursor_holes"),
        sa.PrimaryKeyConstraint("name"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
