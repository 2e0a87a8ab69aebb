"""Every check of the tables refuses what it is there for: last defence against our own bugs, and edits by hand."""

import re
from collections.abc import Iterator

import pytest
from sqlalchemy import CheckConstraint, Engine, Table, create_engine
from sqlalchemy.exc import DBAPIError

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
    schema.leases: {"token": "sound", "agent_name": "a", "memory_mb": 1, "ttl_seconds": 1.0, "expires_at": utc_now()},
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
    schema.concurrency_caps: {"cap_key": "sound"},
    schema.policies: {"scope": "agent", "name": "sound", "document": "{}"},
    schema.policy_history: {"scope": "agent", "name": "sound", "version": 1},
    schema.schedules: {
        "schedule_id": "sound",
        "anchor_at": utc_now(),
        "job": "{}",
        "catch_up": "skip",
        "catch_up_max": 1,
    },
    schema.audit: {"event_type": "sound"},
    schema.tally_cursor: {"name": "sound", "position": 0, "holes": "[]"},
}

#: By each check, changes of such a row that it alone refuses.
REFUSED: dict[str, list[dict[str, object]]] = {
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
            with pytest.raises(DBAPIError, match=rf"\b({told})\W"):
                connection.execute(table.insert().values(SOUND[table] | values))
        connection.execute(table.insert().values(SOUND[table]))


def test_every_check_has_its_case():
    assert REFUSED.keys() == CHECKS.keys()
