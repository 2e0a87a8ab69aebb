"""schedules: recurring jobs.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TABLE_OPTIONS = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def utc_now() -> sa.TextClause:
    """Default of a column: the database's clock in UTC."""
    sqlite = op.get_context().dialect.name == "sqlite"
    return sa.text("(strftime('%Y-%m-%d %H:%M:%f000', 'now'))" if sqlite else "utc_timestamp(6)")


def upgrade() -> None:
    op.create_table(
        "schedules",
        sa.Column("schedule_id", sa.String(length=128), nullable=False),
        sa.Column("cron", sa.String(length=255), nullable=True),
        sa.Column("every_seconds", sa.Float(precision=53), nullable=True),
        sa.Column("anchor_at", UTC_DATETIME, nullable=False),
        sa.Column("timezone", sa.String(length=64), server_default="UTC", nullable=False),
        sa.Column("job", LONG_TEXT, nullable=False),
        sa.Column("catch_up", sa.String(length=8), nullable=False),
        sa.Column("catch_up_max", sa.Integer(), nullable=False),
        sa.Column("enabled", sa.Boolean(), server_default="1", nullable=False),
        sa.Column("next_fire_at", UTC_DATETIME, nullable=True),
        sa.Column("last_fired_at", UTC_DATETIME, nullable=True),
        sa.Column("last_job_id", sa.String(length=128), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("version", sa.Integer(), server_default="1", nullable=False),
        sa.Column("actor", sa.String(length=255), nullable=True),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("updated_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.CheckConstraint("catch_up IN ('skip', 'last', 'all')", name="ck_schedules_catch_up"),
        sa.PrimaryKeyConstraint("schedule_id"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_index("ix_schedules_due", "schedules", ["next_fire_at"], unique=False, if_not_exists=True)
