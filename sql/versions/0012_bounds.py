"""bounds: what the API refuses, tables refuse of those who edit rows; and no indexes that nobody uses.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

from collections.abc import Iterator

from alembic import op

from orchestrator.store.dialect.checks import Check, add_checks

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

MOST, YEAR_S = 2**31 - 1, 31_536_000
NUMBER, FROM_0, FROM_1 = "INTEGER NOT NULL", "INTEGER NOT NULL DEFAULT '0'", "INTEGER NOT NULL DEFAULT '1'"
#: Table → column, its definition, the least and the most that mean something.
NUMBERS = {
    "orchestrator_jobs": (
        ("priority", FROM_0, -100, 100),
        ("min_memory_mb", "INTEGER", 0, MOST),
        ("gpu_count", FROM_1, 1, 64),
        ("cost_units", "FLOAT", 0, 100),
        ("expected_duration_sec", "FLOAT", 0, YEAR_S),
        ("max_runtime_sec", "FLOAT", 0, YEAR_S),
        ("max_attempts", NUMBER, 1, 100),
        ("retry_base_sec", "FLOAT", 0, YEAR_S),
        ("retry_cap_sec", "FLOAT", 0, YEAR_S),
        ("attempt", FROM_0, 0, MOST),
        ("attempts", FROM_0, 0, MOST),
        ("crashes", FROM_0, 0, MOST),
        ("redrives", FROM_0, 0, MOST),
    ),
    "task_stages": (("made", FROM_0, 0, MOST),),
    "spawns": (("remaining", NUMBER, 0, MOST),),
    "orchestrator_leases": (
        ("memory_mb", NUMBER, 0, MOST),
        ("host_cpu_milli", FROM_0, 0, MOST),
        ("host_memory_mb", FROM_0, 0, MOST),
        ("ttl_seconds", "FLOAT NOT NULL", 0, 2 * YEAR_S),
    ),
    "lease_gpus": (("memory_mb", NUMBER, 0, MOST),),
    "nodes": (
        ("cpu_milli", "INTEGER", 0, MOST),
        ("memory_mb", "INTEGER", 0, MOST),
        ("leased_cpu_milli", FROM_0, 0, MOST),
        ("leased_memory_mb", FROM_0, 0, MOST),
    ),
    "workers": (
        ("slots", NUMBER, 0, MOST),
        ("busy", FROM_0, 0, MOST),
        ("ready", FROM_0, 0, MOST),
        ("revision", FROM_0, 0, MOST),
    ),
    "worker_pools": (
        ("desired_workers", FROM_0, 0, 4096),
        ("spawned_workers", FROM_0, 0, MOST),
        ("hold_seconds", "INTEGER NOT NULL DEFAULT '600'", 0, YEAR_S),
        ("min_workers", FROM_0, 0, 4096),
        ("max_workers", "INTEGER", 0, 4096),
        ("slots", FROM_1, 1, 512),
        ("min_memory_mb", "INTEGER", 0, MOST),
        ("gpu_count", FROM_1, 1, 64),
        ("revision", FROM_1, 0, MOST),
    ),
    "pool_assignments": (("workers", NUMBER, 0, MOST),),
    "schedules": (("every_seconds", "FLOAT(53)", 1, YEAR_S), ("catch_up_max", NUMBER, 1, 100)),
}
#: Table → column of JSON, how it begins.
TEXTS = {
    "orchestrator_jobs": (("concurrency_keys", "["), ("constraints", "{"), ("held_caps", "[")),
    "nodes": (("supervisor_types", "["),),
    "workers": (("batch_sizes", "{"),),
}
#: Table → column, its definition, its rule.
OTHERS = {
    "worker_pools": (("metadata", "LONGTEXT", "substr(metadata, 1, 1) = '{'"),),
    "schedules": (("cron", "VARCHAR(255)", "(cron IS NULL) <> (every_seconds IS NULL)"),),
    "tally_cursor": (("holes", "LONGTEXT NOT NULL", "substr(holes, 1, 1) = '['"),),
}
#: Indexes that no query was led by, and every write kept up.
UNUSED = {"ix_task_stages_created": "task_stages", "ix_lease_gpus_gpu": "lease_gpus"}


def upgrade() -> None:
    add_checks(op.get_bind(), [check for table in (NUMBERS | OTHERS) for check in of_table(table)])
    for index, table in UNUSED.items():
        op.drop_index(index, table, if_exists=True)


def of_table(table: str) -> Iterator[Check]:
    for column, definition, least, most in NUMBERS.get(table, ()):
        yield Check(table, column, definition, f"{column} BETWEEN {least} AND {most}")
    for column, begin in TEXTS.get(table, ()):
        rule = f"{column} IS NULL OR substr({column}, 1, 1) = '{begin}' AND json_valid({column})"
        yield Check(table, column, "LONGTEXT", rule)
    for column, definition, rule in OTHERS.get(table, ()):
        yield Check(table, column, definition, rule)
