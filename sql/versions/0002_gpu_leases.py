"""gpu leases.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


def add_column(table: str, column: sa.Column[object]) -> None:
    """Add a column unless a migration killed half-way did: MariaDB commits each by itself."""
    if column.name not in {known["name"] for known in sa.inspect(op.get_bind()).get_columns(table)}:
        op.add_column(table, column)


def upgrade() -> None:
    add_column("gpus", sa.Column("temperature_c", sa.Integer(), nullable=True))
    add_column("gpus", sa.Column("gate_closed_at", UTC_DATETIME, nullable=True))
    add_column("gpus", sa.Column("quarantined_at", UTC_DATETIME, nullable=True))
    add_column("gpus", sa.Column("quarantine_reason", sa.String(length=255), nullable=True))
    add_column("gpus", sa.Column("reserved_for", sa.String(length=128), nullable=True))
    add_column("gpus", sa.Column("reserved_until", UTC_DATETIME, nullable=True))
    add_column("nodes", sa.Column("cpu_milli", sa.Integer(), nullable=True))
    add_column("nodes", sa.Column("memory_mb", sa.Integer(), nullable=True))
    add_column("nodes", sa.Column("leased_cpu_milli", sa.Integer(), server_default="0", nullable=False))
    add_column("nodes", sa.Column("leased_memory_mb", sa.Integer(), server_default="0", nullable=False))
    add_column("orchestrator_leases", sa.Column("pid", sa.Integer(), nullable=True))
    add_column("orchestrator_leases", sa.Column("slot", sa.String(length=160), nullable=True))
    add_column("orchestrator_leases", sa.Column("host_cpu_milli", sa.Integer(), server_default="0", nullable=False))
    add_column("orchestrator_leases", sa.Column("host_memory_mb", sa.Integer(), server_default="0", nullable=False))
    add_column("orchestrator_leases", sa.Column("ending_as", sa.String(length=8), nullable=True))
    add_column("orchestrator_leases", sa.Column("ending_since", UTC_DATETIME, nullable=True))
    add_column("orchestrator_leases", sa.Column("end_reason", sa.String(length=255), nullable=True))
    add_column("orchestrator_leases", sa.Column("resident", sa.Boolean(), server_default="0", nullable=False))
    add_column("orchestrator_leases", sa.Column("job_type", sa.String(length=64), nullable=True))
    add_column("orchestrator_leases", sa.Column("model_id", sa.String(length=255), nullable=True))
    add_column("orchestrator_leases", sa.Column("pinned", sa.Boolean(), server_default="0", nullable=False))
    add_column("orchestrator_leases", sa.Column("idle_since", UTC_DATETIME, nullable=True))
    add_column("orchestrator_leases", sa.Column("evicted_at", UTC_DATETIME, nullable=True))
    op.create_index("ix_leases_node", "orchestrator_leases", ["node_id", "state"], unique=False, if_not_exists=True)
