"""pools.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
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
    add_column("nodes", sa.Column("supervisor_id", sa.String(length=128), nullable=True))
    add_column("nodes", sa.Column("supervisor_seen_at", UTC_DATETIME, nullable=True))
    add_column("nodes", sa.Column("supervisor_types", LONG_TEXT, nullable=True))
    add_column("nodes", sa.Column("drain_until", UTC_DATETIME, nullable=True))
    add_column("workers", sa.Column("ready", sa.Integer(), server_default="0", nullable=False))
    add_column("workers", sa.Column("revision", sa.Integer(), server_default="0", nullable=False))
    add_column("workers", sa.Column("blocked", sa.Boolean(), server_default="0", nullable=False))
    add_column("workers", sa.Column("trouble", sa.String(length=255), nullable=True))
    add_column("workers", sa.Column("load_seconds", sa.Float(), nullable=True))
    # No version before this one wrote pools, and a database may refuse to add a column whose default is the time.
    if "revision" not in columns("worker_pools"):
        op.drop_table("worker_pools")
    create_pools()
    op.create_table(
        "pool_assignments",
        sa.Column("pool_id", sa.String(length=128), nullable=False),
        sa.Column("node_id", sa.String(length=128), nullable=False),
        sa.Column("revision", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("pool_id", "node_id", "revision"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    op.create_index("ix_assignments_node", "pool_assignments", ["node_id"], unique=False, if_not_exists=True)


def create_pools() -> None:
    op.create_table(
        "worker_pools",
        sa.Column("pool_id", sa.String(length=128), nullable=False),
        sa.Column("agent_name", sa.String(length=255), nullable=True),
        sa.Column("model_id", sa.String(length=255), nullable=True),
        sa.Column("adapter", sa.String(length=255), nullable=True),
        sa.Column("variant", sa.String(length=64), nullable=True),
        sa.Column("desired_workers", sa.Integer(), server_default="0", nullable=False),
        sa.Column("spawned_workers", sa.Integer(), server_default="0", nullable=False),
        sa.Column("started_at", UTC_DATETIME, nullable=True),
        sa.Column("last_heartbeat", UTC_DATETIME, nullable=True),
        sa.Column("status", sa.String(length=16), server_default="starting", nullable=False),
        sa.Column("status_reason", sa.String(length=255), nullable=True),
        sa.Column("hold_seconds", sa.Integer(), server_default="600", nullable=False),
        sa.Column("metadata", LONG_TEXT, nullable=True),
        sa.Column("type", sa.String(length=64), nullable=True),
        sa.Column("min_workers", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_workers", sa.Integer(), nullable=True),
        sa.Column("slots", sa.Integer(), server_default="1", nullable=False),
        sa.Column("min_memory_mb", sa.Integer(), nullable=True),
        sa.Column("gpu_count", sa.Integer(), server_default="1", nullable=False),
        sa.Column("autosize", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("provider", sa.String(length=16), server_default="local", nullable=False),
        sa.Column("revision", sa.Integer(), server_default="1", nullable=False),
        sa.Column("active_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("drain_until", UTC_DATETIME, nullable=True),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.CheckConstraint("metadata IS NULL OR json_valid(metadata)", name="ck_pools_metadata"),
        sa.CheckConstraint(
            "status IN ('starting', 'running', 'draining', 'stopped', 'evicted')", name="ck_pools_status"
        ),
        sa.PrimaryKeyConstraint("pool_id"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
