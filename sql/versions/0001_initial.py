"""initial.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def utc_now() -> sa.TextClause:
    """Default of a column: the database's clock in UTC."""
    sqlite = op.get_context().dialect.name == "sqlite"
    return sa.text("(strftime('%Y-%m-%d %H:%M:%f000', 'now'))" if sqlite else "utc_timestamp(6)")


def upgrade() -> None:
    op.create_table(
        "concurrency_caps",
        sa.Column("cap_key", sa.String(length=255), nullable=False),
        sa.Column("in_use", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_in_use", sa.Integer(), nullable=False),
        sa.CheckConstraint("in_use >= 0", name="ck_caps_in_use"),
        sa.PrimaryKeyConstraint("cap_key"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_table(
        "dead_letters",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("origin_id", sa.String(length=64), server_default="", nullable=False),
        sa.Column("entry_id", sa.String(length=64), nullable=True),
        sa.Column("buried_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.PrimaryKeyConstraint("job_id"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_index("ix_dead_letters_entry", "dead_letters", ["entry_id"], unique=False, if_not_exists=True)
    op.create_index("ix_dead_letters_time", "dead_letters", ["buried_at", "job_id"], unique=False, if_not_exists=True)
    op.create_table(
        "gpus",
        sa.Column("gpu_uuid", sa.String(length=64), nullable=False),
        sa.Column("node_id", sa.String(length=128), nullable=False),
        sa.Column("gpu_index", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("total_mb", sa.Integer(), nullable=False),
        sa.Column("usable_mb", sa.Integer(), nullable=False),
        sa.Column("leased_mb", sa.Integer(), server_default="0", nullable=False),
        sa.Column("foreign_mb", sa.Integer(), server_default="0", nullable=False),
        sa.Column("used_mb", sa.Integer(), server_default="0", nullable=False),
        sa.Column("utilization", sa.Float(), nullable=True),
        sa.Column("health", sa.String(length=16), server_default="ok", nullable=False),
        sa.Column("health_reason", sa.String(length=255), nullable=True),
        sa.Column("sampled_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.CheckConstraint("leased_mb >= 0", name="ck_gpus_leased_mb"),
        sa.PrimaryKeyConstraint("gpu_uuid"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_index("ix_gpus_node", "gpus", ["node_id"], unique=False, if_not_exists=True)
    op.create_table(
        "lanes",
        sa.Column("lane", sa.String(length=128), nullable=False),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.PrimaryKeyConstraint("lane"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_table(
        "leadership",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=True),
        sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("acquired_at", UTC_DATETIME, nullable=True),
        sa.Column("expires_at", UTC_DATETIME, nullable=True),
        sa.PrimaryKeyConstraint("name"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_table(
        "lease_gpus",
        sa.Column("token", sa.String(length=160), nullable=False),
        sa.Column("gpu_uuid", sa.String(length=64), nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("token", "gpu_uuid"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_index("ix_lease_gpus_gpu", "lease_gpus", ["gpu_uuid"], unique=False, if_not_exists=True)
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String(length=128), nullable=False),
        sa.Column("hostname", sa.String(length=255), nullable=False),
        sa.Column("gpu_backend", sa.String(length=64), nullable=False),
        sa.Column("started_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("last_heartbeat", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.PrimaryKeyConstraint("node_id"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_table(
        "orchestrator_audit",
        sa.Column("id", COUNTER, autoincrement=True, nullable=False),
        sa.Column("ts", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("event_type", sa.String(length=128), nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=True),
        sa.Column("pool_id", sa.String(length=128), nullable=True),
        sa.Column("worker_id", sa.String(length=128), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("actor", sa.String(length=255), nullable=True),
        sa.Column("details", LONG_TEXT, nullable=True),
        sa.CheckConstraint("details IS NULL OR json_valid(details)", name="ck_audit_details"),
        sa.PrimaryKeyConstraint("id"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_index("ix_audit_job", "orchestrator_audit", ["job_id", "id"], unique=False, if_not_exists=True)
    op.create_table(
        "orchestrator_jobs",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("payload", LONG_TEXT, nullable=False),
        sa.Column("payload_hash", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), server_default="pending", nullable=False),
        sa.Column("agent", sa.String(length=128), nullable=False),
        sa.Column("lane", sa.String(length=128), nullable=False),
        sa.Column("owner_pool", sa.String(length=128), nullable=True),
        sa.Column("model_id", sa.String(length=255), nullable=True),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("min_memory_mb", sa.Integer(), nullable=True),
        sa.Column("gpu_count", sa.Integer(), server_default="1", nullable=False),
        sa.Column("cpu_fallback", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("expected_duration_sec", sa.Float(), nullable=True),
        sa.Column("max_runtime_sec", sa.Float(), nullable=True),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("retry_base_sec", sa.Float(), nullable=True),
        sa.Column("retry_cap_sec", sa.Float(), nullable=True),
        sa.Column("deadline_at", UTC_DATETIME, nullable=True),
        sa.Column("tags", LONG_TEXT, nullable=True),
        sa.Column("trace_context", sa.String(length=128), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("crashes", sa.Integer(), server_default="0", nullable=False),
        sa.Column("redrives", sa.Integer(), server_default="0", nullable=False),
        sa.Column("queued", sa.String(length=10), server_default="ready", nullable=True),
        sa.Column("not_before", UTC_DATETIME, nullable=True),
        sa.Column("expires_at", UTC_DATETIME, nullable=True),
        sa.Column("wait_reason", sa.String(length=255), nullable=True),
        sa.Column("published_at", UTC_DATETIME, nullable=True),
        sa.Column("worker_id", sa.String(length=128), nullable=True),
        sa.Column("lease_token", sa.String(length=160), nullable=True),
        sa.Column("progress", sa.Float(), nullable=True),
        sa.Column("progress_note", sa.String(length=255), nullable=True),
        sa.Column("cancel_requested_at", UTC_DATETIME, nullable=True),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("updated_at", UTC_DATETIME, nullable=True),
        sa.Column("claimed_at", UTC_DATETIME, nullable=True),
        sa.Column("started_at", UTC_DATETIME, nullable=True),
        sa.Column("finished_at", UTC_DATETIME, nullable=True),
        sa.Column("error_kind", sa.String(length=32), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.CheckConstraint("(status = 'pending') = (queued IS NOT NULL)", name="ck_jobs_queued"),
        sa.CheckConstraint(
            "status IN ('pending', 'claimed', 'running', 'done', 'skipped', 'failed', 'cancelled', 'dead_letter')",
            name="ck_jobs_status",
        ),
        sa.CheckConstraint("attempts <= attempt", name="ck_jobs_attempts"),
        sa.CheckConstraint("tags IS NULL OR json_valid(tags)", name="ck_jobs_tags"),
        sa.PrimaryKeyConstraint("job_id"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_index("ix_jobs_agent", "orchestrator_jobs", ["agent", "created_at"], unique=False, if_not_exists=True)
    op.create_index("ix_jobs_created", "orchestrator_jobs", ["created_at"], unique=False, if_not_exists=True)
    op.create_index("ix_jobs_due", "orchestrator_jobs", ["not_before"], unique=False, if_not_exists=True)
    op.create_index("ix_jobs_expiry", "orchestrator_jobs", ["expires_at"], unique=False, if_not_exists=True)
    op.create_index("ix_jobs_queue", "orchestrator_jobs", ["lane", "queued", "rank"], unique=False, if_not_exists=True)
    op.create_index("ix_jobs_status", "orchestrator_jobs", ["status", "created_at"], unique=False, if_not_exists=True)
    op.create_table(
        "orchestrator_leases",
        sa.Column("token", sa.String(length=160), nullable=False),
        sa.Column("agent_name", sa.String(length=255), nullable=False),
        sa.Column("gpu_index", sa.Integer(), nullable=True),
        sa.Column("mode", sa.String(length=3), server_default="gpu", nullable=False),
        sa.Column("state", sa.String(length=8), server_default="active", nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(length=128), nullable=True),
        sa.Column("job_id", sa.String(length=128), nullable=True),
        sa.Column("worker_id", sa.String(length=128), nullable=True),
        sa.Column("ttl_seconds", sa.Float(), nullable=False),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("expires_at", UTC_DATETIME, nullable=False),
        sa.Column("last_heartbeat", UTC_DATETIME, nullable=True),
        sa.Column("metadata", LONG_TEXT, nullable=True),
        sa.CheckConstraint("mode IN ('gpu', 'cpu')", name="ck_leases_mode"),
        sa.CheckConstraint("state IN ('active', 'released', 'expired', 'spent')", name="ck_leases_state"),
        sa.CheckConstraint("metadata IS NULL OR json_valid(metadata)", name="ck_leases_metadata"),
        sa.PrimaryKeyConstraint("token"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_index("idx_leases_agent", "orchestrator_leases", ["agent_name"], unique=False, if_not_exists=True)
    op.create_index(
        "ix_leases_expiry", "orchestrator_leases", ["state", "expires_at"], unique=False, if_not_exists=True
    )
    op.create_index("ix_leases_worker", "orchestrator_leases", ["worker_id"], unique=False, if_not_exists=True)
    op.create_table(
        "orchestrator_results",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("result", LONG_TEXT, nullable=False),
        sa.Column("run_seconds", sa.Float(), nullable=False),
        sa.Column("created_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.PrimaryKeyConstraint("job_id"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_table(
        "policies",
        sa.Column("scope", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("version", sa.Integer(), server_default="1", nullable=False),
        sa.Column("document", LONG_TEXT, nullable=False),
        sa.Column("actor", sa.String(length=255), nullable=True),
        sa.Column("updated_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.CheckConstraint("json_valid(document)", name="ck_policies_document"),
        sa.PrimaryKeyConstraint("scope", "name"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
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
        sa.Column("hold_seconds", sa.Integer(), server_default="600", nullable=False),
        sa.Column("metadata", LONG_TEXT, nullable=True),
        sa.CheckConstraint(
            "status IN ('starting', 'running', 'draining', 'stopped', 'evicted')", name="ck_pools_status"
        ),
        sa.CheckConstraint("metadata IS NULL OR json_valid(metadata)", name="ck_pools_metadata"),
        sa.PrimaryKeyConstraint("pool_id"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.String(length=128), nullable=False),
        sa.Column("node_id", sa.String(length=128), nullable=False),
        sa.Column("pool_id", sa.String(length=128), nullable=False),
        sa.Column("hostname", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("busy", sa.Integer(), server_default="0", nullable=False),
        sa.Column("types", LONG_TEXT, nullable=False),
        sa.Column("status", sa.String(length=16), server_default="active", nullable=False),
        sa.Column("jobs_done", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("jobs_failed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("started_at", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.Column("last_heartbeat", UTC_DATETIME, server_default=utc_now(), nullable=False),
        sa.CheckConstraint("status IN ('active', 'draining', 'stopped', 'lost')", name="ck_workers_status"),
        sa.CheckConstraint("json_valid(types)", name="ck_workers_types"),
        sa.PrimaryKeyConstraint("worker_id"),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        if_not_exists=True,
    )
    op.create_index("ix_workers_liveness", "workers", ["status", "last_heartbeat"], unique=False, if_not_exists=True)
    op.create_index("ix_workers_pool", "workers", ["pool_id", "status"], unique=False, if_not_exists=True)
