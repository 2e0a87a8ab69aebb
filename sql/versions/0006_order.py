"""order: ranks in service, caps, policies and rates.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
COUNTING_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TABLE_OPTIONS = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def utc_now() -> sa.TextClause:
    """Default of a column: the database's clock in UTC."""
    sqlite = op.get_context().dialect.name == "sqlite"
    return sa.text("(strftime('%Y-%m-%d %H:%M:%f000', 'now'))" if sqlite else "utc_timestamp(6)")


def columns(table: str) -> set[str]:
    return {known["name"] for known in sa.inspect(op.get_bind()).get_columns(table)}


def add_column(table: str, column: sa.Column[object]) -> None:
    """Add a column unless a migration killed half-way did: MariaDB commits each by itself."""
    if column.name not in columns(table):
        op.add_column(table, column)


def upgrade() -> None:
    add_column("orchestrator_jobs", sa.Column("cost_units", sa.Float(), nullable=True))
    add_column("orchestrator_jobs", sa.Column("concurrency_keys", LONG_TEXT, nullable=True))
    add_column("orchestrator_jobs", sa.Column("constraints", LONG_TEXT, nullable=True))
    add_column("orchestrator_jobs", sa.Column("blocked_on", sa.String(length=300), nullable=True))
    add_column("orchestrator_jobs", sa.Column("start_by", UTC_DATETIME, nullable=True))
    add_column("orchestrator_jobs", sa.Column("held_caps", LONG_TEXT, nullable=True))
    op.create_index("ix_jobs_blocked", "orchestrator_jobs", ["blocked_on", "rank"], unique=False, if_not_exists=True)
    op.create_index("ix_jobs_start_by", "orchestrator_jobs", ["lane", "start_by"], unique=False, if_not_exists=True)
    add_column("lanes", sa.Column("virtual_time", sa.BigInteger(), server_default="0", nullable=False))
    # Ranks were moments: what waits stays in its order, and what comes is behind it.
    op.execute(
        "UPDATE lanes SET virtual_time = COALESCE((SELECT MAX(j.rank) FROM orchestrator_jobs j"
        " WHERE j.lane = lanes.lane AND j.queued IS NOT NULL), 0) WHERE virtual_time = 0"
    )
    # No version before this one wrote caps.
    if "max_in_use" in columns("concurrency_caps"):
        op.drop_table("concurrency_caps")
    create_tables()


def create_tables() -> None:
    op.create_table(
        "concurrency_caps",
        sa.Column("cap_key", sa.String(length=290), nullable=False),
        sa.Column("in_use", sa.Integer(), server_default="0", nullable=False),
        sa.CheckConstraint("in_use >= 0", name="ck_caps_in_use"),
        sa.PrimaryKeyConstraint("cap_key"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_table(
        "lane_accounts",
        sa.Column("lane", sa.String(length=128), nullable=False),
        sa.Column("agent", sa.String(length=128), nullable=False),
        sa.Column("last_rank", sa.BigInteger(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("lane", "agent"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_table(
        "gate_states",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("closed", sa.Boolean(), nullable=False),
        sa.Column("since", UTC_DATETIME, nullable=True),
        sa.Column("reason", sa.String(length=255), server_default="", nullable=False),
        sa.Column("looked_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_table(
        "gate_holds",
        sa.Column("gate", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("amount", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("gate", "job_id"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_table(
        "policy_history",
        sa.Column("id", COUNTING_ID, autoincrement=True, nullable=False),
        sa.Column("scope", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("document_before", LONG_TEXT, nullable=True),
        sa.Column("document_after", LONG_TEXT, nullable=True),
        sa.Column("actor", sa.String(length=255), nullable=True),
        sa.Column("changed_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.CheckConstraint(
            "document_after IS NULL OR json_valid(document_after)", name="ck_policy_history_document_after"
        ),
        sa.CheckConstraint(
            "document_before IS NULL OR json_valid(document_before)", name="ck_policy_history_document_before"
        ),
        sa.PrimaryKeyConstraint("id"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_index(
        "ix_policy_history_name", "policy_history", ["scope", "name", "version"], unique=False, if_not_exists=True
    )
    op.create_table(
        "rate_buckets",
        sa.Column("agent", sa.String(length=128), nullable=False),
        sa.Column("tokens", sa.Float(precision=53), nullable=False),
        sa.Column("refilled_at", UTC_DATETIME, nullable=False),
        sa.PrimaryKeyConstraint("agent"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
