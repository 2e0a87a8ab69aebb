"""Every check of the tables refuses what it is there for: last defence against our own bugs, and edits by hand."""

import re
from collections.abc import Iterator

import pytest
from pydantic import BaseModel
from sqlalchemy import CheckConstraint, Engine, Table, create_engine, text
from sqlalchemy.exc import DBAPIError

from orchestrator.jobs import JobSpec
from orchestrator.pools import PoolSpec
from orchestrator.schedules import ScheduleSpec
from orchestrator.store import schema
from orchestrator.store.dialect import utc_now

#: Those of a table by their names. One of a column alone has none: MariaDB calls it by the column, SQLite by its rule.
CHECKS = {
    str(check.name): (table, str(check.name))
    for table in schema.metadata.sorted_tables
    for check in table.constraints
    if isinstance(check, CheckConstraint)
} | {
    str(column): (table, f"{re.escape(str(column))}|{re.escape(str(check.sqltext))}")
    for table in schema.metadata.sorted_tables
    for column in table.columns
    for check in column.constraints
    if isinstance(check, CheckConstraint)
}

#: Of each table with checks a row that none of them minds, of a name that no other test uses.
SOUND: dict[Table, dict[str, object]] = {
    schema.jobs: {
        "job_id": "sound",
        "type": "echo",
        "payload": "{}",
        "payload_hash": "",
        "agent": "a",
        "lane": "default",
        "rank": 0,
        "max_attempts": 1,
    },
    schema.workflows: {"workflow_id": "sound", "agent": "a", "content_hash": "", "total": 2},
    schema.task_stages: {"job_id": "sound", "attempt": 1, "seq": 0, "body": "{}"},
    schema.spawns: {"job_id": "sound", "attempt": 1, "workflow_id": "w", "remaining": 1},
    schema.leases: {"token": "sound", "agent_name": "a", "memory_mb": 1, "ttl_seconds": 1.0, "expires_at": utc_now()},
    schema.lease_gpus: {"token": "sound", "gpu_uuid": "g", "memory_mb": 1},
    schema.nodes: {"node_id": "sound", "hostname": "h", "gpu_backend": "none"},
    schema.gpus: {"gpu_uuid": "sound", "node_id": "n", "gpu_index": 0, "name": "", "total_mb": 1, "usable_mb": 1},
    schema.workers: {
        "worker_id": "sound",
        "node_id": "n",
        "pool_id": "p",
        "hostname": "h",
        "pid": 1,
        "slots": 1,
        "types": "[]",
    },
    schema.worker_pools: {"pool_id": "sound"},
    schema.pool_assignments: {"pool_id": "sound", "node_id": "n", "revision": 1, "workers": 1},
    schema.concurrency_caps: {"cap_key": "sound"},
    schema.policies: {"scope": "agent", "name": "sound", "document": "{}"},
    schema.policy_history: {"scope": "agent", "name": "sound", "version": 1},
    schema.schedules: {
        "schedule_id": "sound",
        "every_seconds": 60.0,
        "anchor_at": utc_now(),
        "job": "{}",
        "catch_up": "skip",
        "catch_up_max": 1,
    },
    schema.audit: {"event_type": "sound"},
    schema.tally_cursor: {"name": "sound", "position": 0, "holes": "[]"},
}


def beyond(column: str, *values: object) -> list[dict[str, object]]:
    """One value too far on either side."""
    return [{column: value} for value in values]


def unlike(column: str, *values: str) -> list[dict[str, object]]:
    """Neither what is cut off, nor what is JSON of another shape."""
    return [{column: value} for value in (*values, "", "x", "5", "null")]


YEAR_S = 31_536_000
#: By each check, changes of such a row that it alone refuses.
REFUSED: dict[str, list[dict[str, object]]] = {
    "orchestrator_jobs.priority": beyond("priority", -101, 101),
    "orchestrator_jobs.min_memory_mb": beyond("min_memory_mb", -1, -5000),
    "orchestrator_jobs.gpu_count": beyond("gpu_count", -1, 0, 65),
    "orchestrator_jobs.cost_units": beyond("cost_units", -0.5, 100.5),
    "orchestrator_jobs.expected_duration_sec": beyond("expected_duration_sec", -1, 2 * YEAR_S),
    "orchestrator_jobs.max_runtime_sec": beyond("max_runtime_sec", -1, 2 * YEAR_S),
    "orchestrator_jobs.max_attempts": beyond("max_attempts", 0, 101),
    "orchestrator_jobs.retry_base_sec": beyond("retry_base_sec", -1, 2 * YEAR_S),
    "orchestrator_jobs.retry_cap_sec": beyond("retry_cap_sec", -1, 2 * YEAR_S),
    "orchestrator_jobs.attempt": [{"attempt": -1, "attempts": -1}],
    "orchestrator_jobs.attempts": [{"attempts": -1}],
    "orchestrator_jobs.crashes": beyond("crashes", -1),
    "orchestrator_jobs.redrives": beyond("redrives", -1),
    "orchestrator_jobs.concurrency_keys": unlike("concurrency_keys", "[", '["a"', '{"a": 1}'),
    "orchestrator_jobs.constraints": unlike("constraints", "{", "[]"),
    "orchestrator_jobs.held_caps": unlike("held_caps", "[", '{"a": 1}'),
    "task_stages.made": beyond("made", -1),
    "spawns.remaining": beyond("remaining", -1),
    "orchestrator_leases.memory_mb": beyond("memory_mb", -1),
    "orchestrator_leases.host_cpu_milli": beyond("host_cpu_milli", -1),
    "orchestrator_leases.host_memory_mb": beyond("host_memory_mb", -1),
    "orchestrator_leases.ttl_seconds": beyond("ttl_seconds", -1, 3e38),
    "lease_gpus.memory_mb": beyond("memory_mb", -1),
    "nodes.cpu_milli": beyond("cpu_milli", -1),
    "nodes.memory_mb": beyond("memory_mb", -1),
    "nodes.leased_cpu_milli": beyond("leased_cpu_milli", -1),
    "nodes.leased_memory_mb": beyond("leased_memory_mb", -1),
    "nodes.supervisor_types": unlike("supervisor_types", "[", "{}"),
    "workers.slots": beyond("slots", -1),
    "workers.busy": beyond("busy", -1),
    "workers.ready": beyond("ready", -1),
    "workers.revision": beyond("revision", -1),
    "workers.batch_sizes": unlike("batch_sizes", "{", "[]"),
    "worker_pools.desired_workers": beyond("desired_workers", -3, 4097),
    "worker_pools.spawned_workers": beyond("spawned_workers", -1),
    "worker_pools.hold_seconds": beyond("hold_seconds", -1, YEAR_S + 1),
    "worker_pools.metadata": [{"metadata": "[]"}, {"metadata": "5"}],
    "worker_pools.min_workers": beyond("min_workers", -1, 4097),
    "worker_pools.max_workers": beyond("max_workers", -1, 4097),
    "worker_pools.slots": beyond("slots", -1, 0, 513),
    "worker_pools.min_memory_mb": beyond("min_memory_mb", -1),
    "worker_pools.gpu_count": beyond("gpu_count", -1, 0, 65),
    "worker_pools.revision": beyond("revision", -1),
    "pool_assignments.workers": beyond("workers", -1),
    "schedules.cron": [{"every_seconds": None}, {"cron": "* * * * *"}],
    "schedules.every_seconds": beyond("every_seconds", 0, -1, 0.5, YEAR_S + 1, 1e308),
    "schedules.catch_up_max": beyond("catch_up_max", 0, 101),
    "tally_cursor.holes": [{"holes": "{}"}, {"holes": "5"}],
    "ck_jobs_status": [{"status": "sleeping", "queued": None}, {"status": "", "queued": None}],
    "ck_jobs_attempts": [{"attempts": 1}],
    "ck_jobs_queued": [{"queued": None}, {"status": "done"}],
    "ck_jobs_tags": [{"tags": "["}],
    "orchestrator_jobs.queued": [{"queued": "redy"}, {"queued": ""}],
    "ck_workflows_status": [{"status": "paused"}],
    "ck_workflows_counts": [{"done": -1}, {"failed": -1}, {"cancelled": -1}],
    "ck_workflows_total": [{"done": 1, "failed": 1, "cancelled": 1}, {"total": -1}],
    "workflows.sweep": [{"sweep": "some"}],
    "ck_leases_mode": [{"mode": "tpu"}],
    "ck_leases_state": [{"state": "lent"}],
    "ck_leases_metadata": [{"metadata": "{"}],
    "orchestrator_leases.ending_as": [{"ending_as": "active"}],
    "ck_gpus_leased_mb": [{"leased_mb": -1}],
    "gpus.health": [{"health": "well"}],
    "ck_workers_status": [{"status": "asleep"}],
    "ck_workers_kind": [{"kind": "thread"}],
    "ck_workers_types": [{"types": "echo"}],
    "ck_pools_status": [{"status": "paused"}],
    "ck_pools_metadata": [{"metadata": "{"}],
    "worker_pools.provider": [{"provider": "nobody"}],
    "ck_caps_in_use": [{"in_use": -1}],
    "ck_policies_document": [{"document": ""}],
    "ck_policy_history_document_before": [{"document_before": "{"}],
    "ck_policy_history_document_after": [{"document_after": "{"}],
    "ck_schedules_catch_up": [{"catch_up": "none"}],
    "ck_audit_details": [{"details": "{"}],
    "ck_tally_cursor_holes": [{"holes": "[1,"}],
}


@pytest.fixture(scope="module", params=["mariadb", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Both databases in turn, for transactions that are rolled back."""
    if request.param == "mariadb":
        yield request.getfixturevalue("mariadb_with_tables").engine
    else:
        made = create_engine(f"sqlite:///{request.getfixturevalue('sqlite_with_tables')}")
        yield made
        made.dispose()


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_by_the_check_that_says_so(engine, name):
    table, told = CHECKS[name]
    with engine.connect() as connection:
        for values in REFUSED[name]:
            with pytest.raises(DBAPIError, match=rf"(?<!\w)({told})\W"):
                connection.execute(table.insert().values(SOUND[table] | values))
        connection.execute(table.insert().values(SOUND[table]))


def test_every_check_has_its_case():
    assert REFUSED.keys() == CHECKS.keys()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_no_text_is_kept_among_numbers(engine):
    """SQLite keeps what it is given, whatever the column's type, and a text is above every number."""
    bounded = [name for name in REFUSED if "BETWEEN" in CHECKS[name][1]]
    assert len(bounded) > 30
    with engine.connect() as connection:
        for name in bounded:
            table, told = CHECKS[name]
            with pytest.raises(DBAPIError, match=rf"(?<!\w)({told})\W"):
                connection.execute(table.insert().values(SOUND[table] | {name.split(".")[1]: text("'x'")}))


#: What the API takes, and where it is kept.
ASKED: list[tuple[type[BaseModel], Table]] = [
    (JobSpec, schema.jobs),
    (PoolSpec, schema.worker_pools),
    (ScheduleSpec, schema.schedules),
]


def extremes(model: type[BaseModel], table: Table) -> Iterator[tuple[str, float]]:
    """The least and the most that the API takes of each number that is a column of its own."""
    for name, said in model.model_json_schema()["properties"].items():
        for bounds in said.get("anyOf", [said]):
            if name in table.columns and "maximum" in bounds:
                yield name, bounds.get("minimum", 1e-300)
                yield name, bounds["maximum"]


@pytest.mark.parametrize(("model", "table"), ASKED)
def test_what_the_api_takes_the_tables_take(engine, model, table):
    taken = list(extremes(model, table))
    assert len(taken) >= 4
    for name, value in taken:
        with engine.connect() as connection:
            connection.execute(table.insert().values(SOUND[table] | {name: value}))
