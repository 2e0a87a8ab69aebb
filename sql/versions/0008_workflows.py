"""workflows: tasks that wait for one another, and those that tasks add.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
TABLE_OPTIONS = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def utc_now() -> sa.TextClause:
    """Default of a column: the database's clock in UTC."""
    sqlite = op.get_context().dialect.name == "sqlite"
    return sa.text("(strftime('%Y-%m-%d %H:%M:%f000', 'now'))" if sqlite else "utc_timestamp(6)")


def add_column(table: str, column: sa.Column[object]) -> None:
    """Add a column unless a migration killed half-way did: MariaDB commits each by itself."""
    if column.name not in {known["name"] for known in sa.inspect(op.get_bind()).get_columns(table)}:
        op.add_column(table, column)


def upgrade() -> None:
    add_column("orchestrator_jobs", sa.Column("workflow_id", sa.String(length=128), nullable=True))
    add_column("orchestrator_jobs", sa.Column("task", sa.String(length=128), nullable=True))
    add_column("orchestrator_jobs", sa.Column("needs", sa.Integer(), nullable=True))
    add_column("orchestrator_jobs", sa.Column("waits_for", sa.Integer(), nullable=True))
    add_column("orchestrator_jobs", sa.Column("optional", sa.Boolean(), server_default="0", nullable=False))
    add_column("orchestrator_jobs", sa.Column("spawned", sa.Boolean(), server_default="0", nullable=False))
    create_index("ix_jobs_workflow", "orchestrator_jobs", "workflow_id", "created_at", "job_id")
    op.create_table(
        "workflows",
        sa.Column("workflow_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=True),
        sa.Column("agent", sa.String(length=128), nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), server_default="running", nullable=False),
        sa.Column("implicit", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("done", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failed", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cancelled", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_runtime_sec", sa.Float(precision=53), nullable=True),
        sa.Column("deadline_at", UTC_DATETIME, nullable=True),
        sa.Column("expires_at", UTC_DATETIME, nullable=True),
        sa.Column("sweep", sa.String(length=8), nullable=True),
        sa.Column("reason", sa.String(length=255), nullable=True),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("finished_at", UTC_DATETIME, nullable=True),
        sa.CheckConstraint("status IN ('running', 'done', 'failed', 'cancelled')", name="ck_workflows_status"),
        sa.CheckConstraint("done >= 0 AND failed >= 0 AND cancelled >= 0", name="ck_workflows_counts"),
        sa.CheckConstraint("done + failed + cancelled <= total", name="ck_workflows_total"),
        sa.PrimaryKeyConstraint("workflow_id"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    create_index("ix_workflows_created", "workflows", "created_at")
    create_index("ix_workflows_status", "workflows", "status", "created_at")
    create_index("ix_workflows_agent", "workflows", "agent", "created_at")
    create_index("ix_workflows_expiry", "workflows", "expires_at")
    create_index("ix_workflows_sweep", "workflows", "sweep")
    create_tables_of_tasks()


def create_tables_of_tasks() -> None:
    op.create_table(
        "task_edges",
        sa.Column("task_id", sa.String(length=128), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("needs_id", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("task_id", "position"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    create_index("ix_task_edges_needs", "task_edges", "needs_id")
    op.create_table(
        "task_stages",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("body", LONG_TEXT, nullable=False),
        sa.Column("made", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "seq"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    create_index("ix_task_stages_created", "task_stages", "created_at")
    op.create_table(
        "spawns",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("workflow_id", sa.String(length=128), nullable=False),
        sa.Column("remaining", sa.Integer(), nullable=False),
        sa.Column("trouble", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "attempt"),
        **TABLE_OPTIONS,
        if_not_exists=True,
    )
    create_index("ix_spawns_workflow", "spawns", "workflow_id")


def create_index(name: str, table: str, *columns: str) -> None:
    op.create_index(name, table, [*columns], unique=False, if_not_exists=True)
