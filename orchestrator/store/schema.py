"""The tables. Migrations in `sql/` build the same ones; a test holds the two together.

| table | one row is | written by |
|---|---|---|
| orchestrator_jobs | a job, its place in the queue and its current attempt | submit, publisher, workers, leader |
| lanes | a lane in use (nobody searches the backlog for them), and how far it came | submit, publisher, leader |
| lane_accounts | how much service an agent has asked of a lane | submit, leader |
| orchestrator_results | what a finished job returned | workers |
| dead_letters | a job that is given up, until it is redriven or purged | workers, leader, operators |
| orchestrator_leases, lease_gpus | a reservation of GPU memory, and its share on each GPU | claim, API, leader |
| nodes, gpus, workers | what is alive, and what it has | supervisors; HTTP workers through the API |
| worker_pools, pool_assignments | what a pool should be; how many workers each node runs | operators, leader |
| leadership | who leads, under which epoch | leader |
| concurrency_caps | how many jobs that share a key run now | claim, settle, leader |
| policies, policy_history | what operators decided: shares, rates, gates, caps; and every change of it | operators |
| gate_states | what the leader saw at a gate when it last looked, and whether it is closed | leader, submit |
| gate_holds | a job that counts against a gate until it ends | submit, leader |
| schedules | a job that comes again and again, and when next | operators, leader |
| workflows | tasks that belong together, how many ended and how, and whether all goes on | API, workers, leader |
| task_edges | which other one a task needs, in order: what it waits for, whose results it gets | API, workers, leader |
| task_stages | tasks that an attempt wants to add, which are nothing until it succeeds | workers, leader |
| spawns | an attempt that succeeded, and whose staged tasks are being made jobs | workers, leader |
| tallies, tally_cursor | a total of what happened to jobs; how far the audit trail is counted | leader |
| rate_buckets | how many submits an agent has left at a moment | submit |
| orchestrator_audit | one thing that happened | every transaction |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from orchestrator.gpu import Health
from orchestrator.jobs import Queued, Status
from orchestrator.leases import LEASE_ENDS, LeaseState
from orchestrator.pools import MAX_WORKERS, PoolState, Provider
from orchestrator.ranking import MAX_PRIORITY
from orchestrator.setting_values import MAX_BACKEND
from orchestrator.store.dialect import TABLE_OPTIONS, CountingId, LongText, UtcDateTime, utc_now
from orchestrator.workflows import FlowStatus, Sweep

metadata = MetaData()

WORKER_STATES = ACTIVE, DRAINING, STOPPED, LOST = ("active", "draining", "stopped", "lost")
#: Ours, which read their lane's stream, and those that fetch their jobs over HTTP.
WORKER_KINDS = ("process", "http")
#: Workers that send heartbeats, and those that do so no more.
LIVE_WORKERS, ENDED_WORKERS = (ACTIVE, DRAINING), (STOPPED, LOST)
#: As long as anything may be asked to take.
YEAR_S = 31_536_000


def _one_of(column: str, values: Iterable[str], table: str | None = None) -> CheckConstraint:
    """A check of the table; without one, of the column alone.

    That has no name of its own, and MariaDB changes it without copying all rows while nobody can write.
    """
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(text(f"{column} IN ({listed})"), name=f"ck_{table}_{column}" if table else None)


def _within(column: str, least: int, most: int = 2**31 - 1) -> CheckConstraint:
    """Of the column alone. Bounds on both sides: SQLite keeps any text in any column, and it is above every number."""
    return CheckConstraint(text(f"{column} BETWEEN {least} AND {most}"))


def _count(column: str, server_default: str | None = None) -> Column[int]:
    return Column(column, Integer, _within(column, 0), nullable=False, server_default=server_default)


def _seconds(column: str) -> Column[float]:
    # From 0 on, although nobody may ask for 0: what is next to it is 0 in a Float.
    return Column(column, Float, _within(column, 0, YEAR_S))


def _begins(column: str, bracket: str) -> CheckConstraint:
    return CheckConstraint(text(f"substr({column}, 1, 1) = '{bracket}'"))


def _list(column: str) -> Column[str]:
    return _shaped(column, "[")


def _object(column: str) -> Column[str]:
    return _shaped(column, "{")


def _shaped(column: str, bracket: str) -> Column[str]:
    """JSON, or NULL. With json_valid alone MariaDB would make it another type, which json_array takes otherwise."""
    rule = f"{column} IS NULL OR {_begins(column, bracket).sqltext} AND json_valid({column})"
    return Column(column, LongText, CheckConstraint(text(rule)))


def _json(
    column: str, table: str, *checks: CheckConstraint, nullable: bool = True
) -> tuple[Column[str], CheckConstraint]:
    rule = f"{column} IS NULL OR json_valid({column})" if nullable else f"json_valid({column})"
    valid = CheckConstraint(text(rule), name=f"ck_{table}_{column}")
    return Column(column, LongText, *checks, nullable=nullable), valid


def _created(name: str = "created_at") -> Column[object]:
    return Column(name, UtcDateTime, nullable=False, server_default=utc_now())


jobs = Table(
    "orchestrator_jobs",
    metadata,
    Column("job_id", String(128), primary_key=True),
    Column("type", String(64), nullable=False),
    # No json_valid here and for results: MariaDB's stops at 32 levels. The text is our own canonical JSON.
    Column("payload", LongText, nullable=False),
    Column("payload_hash", String(64), nullable=False),
    Column("status", String(16), nullable=False, server_default=Status.PENDING),
    Column("agent", String(128), nullable=False),
    Column("lane", String(128), nullable=False),
    Column("owner_pool", String(128)),
    Column("model_id", String(255)),
    Column("priority", Integer, _within("priority", -MAX_PRIORITY, MAX_PRIORITY), nullable=False, server_default="0"),
    Column("rank", BigInteger, nullable=False),
    # What it asks for
    Column("min_memory_mb", Integer, _within("min_memory_mb", 0)),
    Column("gpu_count", Integer, _within("gpu_count", 1, 64), nullable=False, server_default="1"),
    Column("cpu_fallback", Boolean, nullable=False, server_default="0"),
    Column("cost_units", Float, _within("cost_units", 0, 100)),
    _seconds("expected_duration_sec"),
    _seconds("max_runtime_sec"),
    Column("max_attempts", Integer, _within("max_attempts", 1, 100), nullable=False),
    _seconds("retry_base_sec"),
    _seconds("retry_cap_sec"),
    Column("deadline_at", UtcDateTime),
    *_json("tags", "jobs"),
    # Keys that limit it beside its agent, type and model; what it wants of the time it runs at.
    _list("concurrency_keys"),
    _object("constraints"),
    Column("trace_context", String(128)),
    # The workflow that it is a task of, its name there, how many tasks it needs (also those that are not made yet), for
    # how many of them it waits; whether others go on without it; whether it added tasks.
    Column("workflow_id", String(128)),
    Column("task", String(128)),
    Column("needs", Integer),
    Column("waits_for", Integer),
    Column("optional", Boolean, nullable=False, server_default="0"),
    Column("spawned", Boolean, nullable=False, server_default="0"),
    # Where it is: `attempt` fences and only grows; `attempts` counts what is charged against max_attempts.
    _count("attempt", "0"),
    _count("attempts", "0"),
    _count("crashes", "0"),
    _count("redrives", "0"),
    # `queued` says where a pending job waits: delayed (until not_before) → ready → announced, or blocked (until what
    # stands in `blocked_on` lets it go). NULL: not pending.
    Column("queued", String(10), _one_of("queued", Queued), server_default="ready"),
    Column("not_before", UtcDateTime),
    Column("blocked_on", String(300)),
    # When it last became ready after it waited for a moment or for something else; NULL: ready since its submit.
    Column("ready_at", UtcDateTime),
    # The latest start that still meets the deadline, while it is ready or announced.
    Column("start_by", UtcDateTime),
    # The deadline, until the job ends: after that it must not be found by those who look for overdue jobs.
    Column("expires_at", UtcDateTime),
    Column("wait_reason", String(255)),
    Column("published_at", UtcDateTime),
    Column("worker_id", String(128)),
    Column("lease_token", String(160)),
    # The capped keys that it counts for while it is owned; NULL: none.
    _list("held_caps"),
    Column("progress", Float),
    Column("progress_note", String(255)),
    Column("cancel_requested_at", UtcDateTime),
    _created(),
    Column("updated_at", UtcDateTime),
    Column("claimed_at", UtcDateTime),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    Column("error_kind", String(32)),
    Column("last_error", Text),
    _one_of("status", Status, "jobs"),
    CheckConstraint(text("attempts <= attempt"), name="ck_jobs_attempts"),
    CheckConstraint(text("(status = 'pending') = (queued IS NOT NULL)"), name="ck_jobs_queued"),
    # The publisher's range scan: what is ready, in order of rank; and what is announced. Owned and ended jobs have
    # no `queued`, so their further life does not touch this index.
    Index("ix_jobs_queue", "lane", "queued", "rank"),
    # Delayed jobs that become due; NULL for all others.
    Index("ix_jobs_due", "not_before"),
    Index("ix_jobs_expiry", "expires_at"),
    # Blocked jobs by what they wait for, in order; those with deadlines that may be announced, by their latest start.
    # NULL for all others.
    Index("ix_jobs_blocked", "blocked_on", "rank"),
    Index("ix_jobs_start_by", "lane", "start_by"),
    # Keyset pages.
    Index("ix_jobs_created", "created_at"),
    Index("ix_jobs_agent", "agent", "created_at"),
    Index("ix_jobs_status", "status", "created_at"),
    Index("ix_jobs_workflow", "workflow_id", "created_at", "job_id"),
    **TABLE_OPTIONS,
)

workflows = Table(
    "workflows",
    metadata,
    Column("workflow_id", String(128), primary_key=True),
    Column("name", String(255)),
    Column("agent", String(128), nullable=False),
    Column("content_hash", String(64), nullable=False),
    Column("status", String(16), nullable=False, server_default=FlowStatus.RUNNING),
    # Made by a job that added tasks and was none itself.
    Column("implicit", Boolean, nullable=False, server_default="0"),
    # Tasks in all, with those that are staged still; and those that ended, by how they did.
    Column("total", Integer, nullable=False),
    Column("done", Integer, nullable=False, server_default="0"),
    Column("failed", Integer, nullable=False, server_default="0"),
    Column("cancelled", Integer, nullable=False, server_default="0"),
    Column("max_runtime_sec", Float(53)),
    Column("deadline_at", UtcDateTime),
    # The end of its time, while it runs.
    Column("expires_at", UtcDateTime),
    # NULL: nothing is done to its tasks.
    Column("sweep", String(8), _one_of("sweep", Sweep)),
    Column("reason", String(255)),
    _created(),
    Column("finished_at", UtcDateTime),
    _one_of("status", FlowStatus, "workflows"),
    CheckConstraint(text("done >= 0 AND failed >= 0 AND cancelled >= 0"), name="ck_workflows_counts"),
    CheckConstraint(text("done + failed + cancelled <= total"), name="ck_workflows_total"),
    Index("ix_workflows_created", "created_at"),
    Index("ix_workflows_status", "status", "created_at"),
    Index("ix_workflows_agent", "agent", "created_at"),
    # NULL for nearly all.
    Index("ix_workflows_expiry", "expires_at"),
    Index("ix_workflows_sweep", "sweep"),
    **TABLE_OPTIONS,
)

task_edges = Table(
    "task_edges",
    metadata,
    Column("task_id", String(128), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("needs_id", String(128), nullable=False),
    Index("ix_task_edges_needs", "needs_id"),
    **TABLE_OPTIONS,
)

task_stages = Table(
    "task_stages",
    metadata,
    Column("job_id", String(128), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    # No json_valid: payloads may be deep.
    Column("body", LongText, nullable=False),
    # How many of the tasks in it are jobs already.
    _count("made", "0"),
    _created(),
    **TABLE_OPTIONS,
)

spawns = Table(
    "spawns",
    metadata,
    Column("job_id", String(128), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("workflow_id", String(128), nullable=False),
    # Tasks that are no jobs yet.
    _count("remaining"),
    Column("trouble", String(255)),
    Index("ix_spawns_workflow", "workflow_id"),
    **TABLE_OPTIONS,
)

lanes = Table(
    "lanes",
    metadata,
    Column("lane", String(128), primary_key=True),
    # The highest rank announced so far, in service: the lane's own clock.
    Column("virtual_time", BigInteger, nullable=False, server_default="0"),
    _created(),
    **TABLE_OPTIONS,
)

lane_accounts = Table(
    "lane_accounts",
    metadata,
    Column("lane", String(128), primary_key=True),
    Column("agent", String(128), primary_key=True),
    # The rank of its last job without its priority, and what its last submission was charged.
    Column("last_rank", BigInteger, nullable=False),
    Column("charged", BigInteger, nullable=False),
    **TABLE_OPTIONS,
)

results = Table(
    "orchestrator_results",
    metadata,
    Column("job_id", String(128), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("result", LongText, nullable=False),
    Column("run_seconds", Float, nullable=False),
    _created(),
    # Those that are old enough to be forgotten.
    Index("ix_results_created", "created_at"),
    **TABLE_OPTIONS,
)

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("job_id", String(128), primary_key=True),
    Column("reason", String(32), nullable=False),
    Column("attempts", Integer, nullable=False),
    # The entry that brought the job last, and the one that tells of its end: NULL until the leader has written it.
    Column("origin_id", String(64), nullable=False, server_default=""),
    Column("entry_id", String(64)),
    _created("buried_at"),
    Index("ix_dead_letters_time", "buried_at", "job_id"),
    Index("ix_dead_letters_entry", "entry_id"),
    **TABLE_OPTIONS,
)

leases = Table(
    "orchestrator_leases",
    metadata,
    # SHA-256 of the client's secret, so that a reader of this table cannot use a lease; job:ID:ATTEMPT for jobs.
    Column("token", String(160), primary_key=True),
    Column("agent_name", String(255), nullable=False),
    Column("gpu_index", Integer),
    Column("mode", String(3), nullable=False, server_default="gpu"),
    Column("state", String(8), nullable=False, server_default=LeaseState.ACTIVE),
    _count("memory_mb"),
    Column("node_id", String(128)),
    Column("job_id", String(128)),
    Column("worker_id", String(128)),
    # Whose processes use the memory: a process and its descendants, or (WORKER_ID#NUMBER) those of a slot.
    Column("pid", Integer),
    Column("slot", String(160)),
    _count("host_cpu_milli", "0"),
    _count("host_memory_mb", "0"),
    # A job's is longer than the time after which its worker counts as lost, which may be a year.
    Column("ttl_seconds", Float, _within("ttl_seconds", 0, 2 * YEAR_S), nullable=False),
    _created(),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("last_heartbeat", UtcDateTime),
    # Over, but its processes may still hold the memory: active until they are gone, then `ending_as`.
    Column("ending_as", String(8), _one_of("ending_as", LEASE_ENDS)),
    Column("ending_since", UtcDateTime),
    Column("end_reason", String(255)),
    # A warm model's: it outlives jobs, waits idle for the next one of its type, and leaves when it is told to.
    Column("resident", Boolean, nullable=False, server_default="0"),
    Column("job_type", String(64)),
    Column("model_id", String(255)),
    Column("pinned", Boolean, nullable=False, server_default="0"),
    Column("idle_since", UtcDateTime),
    Column("evicted_at", UtcDateTime),
    *_json("metadata", "leases"),
    _one_of("mode", ("gpu", "cpu"), "leases"),
    _one_of("state", LeaseState, "leases"),
    Index("idx_leases_agent", "agent_name"),
    Index("ix_leases_expiry", "state", "expires_at"),
    Index("ix_leases_worker", "worker_id"),
    Index("ix_leases_node", "node_id", "state"),
    **TABLE_OPTIONS,
)

lease_gpus = Table(
    "lease_gpus",
    metadata,
    Column("token", String(160), primary_key=True),
    Column("gpu_uuid", String(64), primary_key=True),
    _count("memory_mb"),
    **TABLE_OPTIONS,
)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", String(128), primary_key=True),
    Column("hostname", String(255), nullable=False),
    Column("gpu_backend", String(MAX_BACKEND), nullable=False),
    # What the host has, when it tells, and what leases took of it.
    Column("cpu_milli", Integer, _within("cpu_milli", 0)),
    Column("memory_mb", Integer, _within("memory_mb", 0)),
    _count("leased_cpu_milli", "0"),
    _count("leased_memory_mb", "0"),
    _created("started_at"),
    Column("last_heartbeat", UtcDateTime, nullable=False, server_default=utc_now()),
    # The one process here that runs the node's share of the pools, when it last said so, and its handlers' types.
    Column("supervisor_id", String(128)),
    Column("supervisor_seen_at", UtcDateTime),
    _list("supervisor_types"),
    # Somebody wants the node empty: its running jobs may end until then. NULL: it takes jobs.
    Column("drain_until", UtcDateTime),
    **TABLE_OPTIONS,
)

gpus = Table(
    "gpus",
    metadata,
    Column("gpu_uuid", String(64), primary_key=True),
    Column("node_id", String(128), nullable=False),
    Column("gpu_index", Integer, nullable=False),
    Column("name", String(255), nullable=False),
    Column("total_mb", Integer, nullable=False),
    Column("usable_mb", Integer, nullable=False),
    Column("leased_mb", Integer, nullable=False, server_default="0"),
    Column("foreign_mb", Integer, nullable=False, server_default="0"),
    Column("used_mb", Integer, nullable=False, server_default="0"),
    Column("utilization", Float),
    Column("health", String(16), _one_of("health", Health), nullable=False, server_default="ok"),
    Column("health_reason", String(255)),
    Column("sampled_at", UtcDateTime, nullable=False, server_default=utc_now()),
    Column("temperature_c", Integer),
    # More memory was used than the gate allows, last at this time; NULL: the gate is open.
    Column("gate_closed_at", UtcDateTime),
    # Memory did not come back when its lease ended; an operator looks, and clears this.
    Column("quarantined_at", UtcDateTime),
    Column("quarantine_reason", String(255)),
    # A job that waited too long: until then nobody else gets anything here.
    Column("reserved_for", String(128)),
    Column("reserved_until", UtcDateTime),
    # Backstop of the guarded UPDATE: no bug may drive the account below zero.
    CheckConstraint(text("leased_mb >= 0"), name="ck_gpus_leased_mb"),
    Index("ix_gpus_node", "node_id"),
    **TABLE_OPTIONS,
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", String(128), primary_key=True),
    Column("node_id", String(128), nullable=False),
    Column("pool_id", String(128), nullable=False),
    Column("hostname", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    _count("slots"),
    _count("busy", "0"),
    # Slots whose model is loaded; which change of its pool it serves; why it cannot do what it should.
    _count("ready", "0"),
    _count("revision", "0"),
    Column("blocked", Boolean, nullable=False, server_default="0"),
    Column("trouble", String(255)),
    Column("load_seconds", Float),
    *_json("types", "workers", nullable=False),
    Column("status", String(16), nullable=False, server_default="active"),
    Column("jobs_done", BigInteger, nullable=False, server_default="0"),
    Column("jobs_failed", BigInteger, nullable=False, server_default="0"),
    # By type, how large its batches were (`orchestrator.batch_sizes`); NULL before the first.
    _object("batch_sizes"),
    _created("started_at"),
    Column("last_heartbeat", UtcDateTime, nullable=False, server_default=utc_now()),
    Column("version", String(64)),
    Column("kind", String(8), nullable=False, server_default="process"),
    _one_of("status", WORKER_STATES, "workers"),
    _one_of("kind", WORKER_KINDS, "workers"),
    Index("ix_workers_liveness", "status", "last_heartbeat"),
    Index("ix_workers_pool", "pool_id", "status"),
    **TABLE_OPTIONS,
)

worker_pools = Table(
    "worker_pools",
    metadata,
    Column("pool_id", String(128), primary_key=True),
    Column("agent_name", String(255)),
    Column("model_id", String(255)),
    Column("adapter", String(255)),
    Column("variant", String(64)),
    Column("desired_workers", Integer, _within("desired_workers", 0, MAX_WORKERS), nullable=False, server_default="0"),
    _count("spawned_workers", "0"),
    Column("started_at", UtcDateTime),
    Column("last_heartbeat", UtcDateTime),
    Column("status", String(16), nullable=False, server_default=PoolState.STARTING),
    Column("status_reason", String(255)),
    Column("hold_seconds", Integer, _within("hold_seconds", 0, YEAR_S), nullable=False, server_default="600"),
    *_json("metadata", "pools", _begins("metadata", "{")),
    Column("type", String(64)),
    Column("min_workers", Integer, _within("min_workers", 0, MAX_WORKERS), nullable=False, server_default="0"),
    Column("max_workers", Integer, _within("max_workers", 0, MAX_WORKERS)),
    Column("slots", Integer, _within("slots", 1, 512), nullable=False, server_default="1"),
    Column("min_memory_mb", Integer, _within("min_memory_mb", 0)),
    Column("gpu_count", Integer, _within("gpu_count", 1, 64), nullable=False, server_default="1"),
    Column("autosize", Boolean, nullable=False, server_default="0"),
    Column("provider", String(16), _one_of("provider", get_args(Provider)), nullable=False, server_default="local"),
    # Grows with every change of the model; workers say which one they serve.
    _count("revision", "1"),
    # When it last had a job, and until when its running jobs may end while it drains.
    Column("active_at", UtcDateTime, nullable=False, server_default=utc_now()),
    Column("drain_until", UtcDateTime),
    _created(),
    _one_of("status", PoolState, "pools"),
    **TABLE_OPTIONS,
)

pool_assignments = Table(
    "pool_assignments",
    metadata,
    Column("pool_id", String(128), primary_key=True),
    Column("node_id", String(128), primary_key=True),
    Column("revision", Integer, primary_key=True, autoincrement=False),
    # 0, of no node: what is left of a deleted pool, so that its revisions are not used again.
    _count("workers"),
    Index("ix_assignments_node", "node_id"),
    **TABLE_OPTIONS,
)

leadership = Table(
    "leadership",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", String(128)),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("acquired_at", UtcDateTime),
    Column("expires_at", UtcDateTime),
    **TABLE_OPTIONS,
)

concurrency_caps = Table(
    "concurrency_caps",
    metadata,
    Column("cap_key", String(290), primary_key=True),
    Column("in_use", Integer, nullable=False, server_default="0"),
    CheckConstraint(text("in_use >= 0"), name="ck_caps_in_use"),
    **TABLE_OPTIONS,
)

policies = Table(
    "policies",
    metadata,
    Column("scope", String(32), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("version", Integer, nullable=False, server_default="1"),
    *_json("document", "policies", nullable=False),
    Column("actor", String(255)),
    _created("updated_at"),
    **TABLE_OPTIONS,
)

policy_history = Table(
    "policy_history",
    metadata,
    # The newest id tells whoever keeps a copy of the policies whether it is old.
    Column("id", CountingId, primary_key=True, autoincrement=True),
    Column("scope", String(32), nullable=False),
    Column("name", String(255), nullable=False),
    Column("version", Integer, nullable=False),
    # NULL: there was none before, or none since.
    *_json("document_before", "policy_history"),
    *_json("document_after", "policy_history"),
    Column("actor", String(255)),
    _created("changed_at"),
    Index("ix_policy_history_name", "scope", "name", "version"),
    **TABLE_OPTIONS,
)

rate_buckets = Table(
    "rate_buckets",
    metadata,
    Column("agent", String(128), primary_key=True),
    Column("tokens", Float(53), nullable=False),
    Column("refilled_at", UtcDateTime, nullable=False),
    **TABLE_OPTIONS,
)

gate_states = Table(
    "gate_states",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("closed", Boolean, nullable=False),
    # Since when what decides about it is so, such as memory above the limit; NULL: it is not so, or not known.
    Column("since", UtcDateTime),
    Column("reason", String(255), nullable=False, server_default=""),
    _created("looked_at"),
    **TABLE_OPTIONS,
)

gate_holds = Table(
    "gate_holds",
    metadata,
    Column("gate", String(255), primary_key=True),
    Column("job_id", String(128), primary_key=True),
    Column("amount", Float(53), nullable=False),
    **TABLE_OPTIONS,
)

schedules = Table(
    "schedules",
    metadata,
    Column("schedule_id", String(128), primary_key=True),
    # One of the two; an interval counts from the anchor.
    Column("cron", String(255), CheckConstraint(text("(cron IS NULL) <> (every_seconds IS NULL)"))),
    Column("every_seconds", Float(53), _within("every_seconds", 1, YEAR_S)),
    Column("anchor_at", UtcDateTime, nullable=False),
    Column("timezone", String(64), nullable=False, server_default="UTC"),
    # No json_valid: as deep as a submitted payload may be.
    Column("job", LongText, nullable=False),
    Column("catch_up", String(8), nullable=False),
    Column("catch_up_max", Integer, _within("catch_up_max", 1, 100), nullable=False),
    Column("enabled", Boolean, nullable=False, server_default="1"),
    # NULL: not enabled, or never again.
    Column("next_fire_at", UtcDateTime),
    Column("last_fired_at", UtcDateTime),
    Column("last_job_id", String(128)),
    # Why the last firing made no job; NULL: it did.
    Column("last_error", Text),
    Column("version", Integer, nullable=False, server_default="1"),
    Column("actor", String(255)),
    _created(),
    _created("updated_at"),
    _one_of("catch_up", ("skip", "last", "all"), "schedules"),
    Index("ix_schedules_due", "next_fire_at"),
    **TABLE_OPTIONS,
)

audit = Table(
    "orchestrator_audit",
    metadata,
    Column("id", CountingId, primary_key=True, autoincrement=True),
    _created("ts"),
    Column("event_type", String(128), nullable=False),
    Column("job_id", String(128)),
    Column("pool_id", String(128)),
    Column("worker_id", String(128)),
    Column("attempt", Integer),
    Column("actor", String(255)),
    *_json("details", "audit"),
    Index("ix_audit_job", "job_id", "id"),
    **TABLE_OPTIONS,
)

tallies = Table(
    "tallies",
    metadata,
    # A metric, a job type and a value of its other label; "" where it has none.
    Column("name", String(64), primary_key=True),
    Column("type", String(64), primary_key=True),
    Column("label", String(64), primary_key=True),
    Column("value", Float(53), nullable=False),
    **TABLE_OPTIONS,
)

tally_cursor = Table(
    "tally_cursor",
    metadata,
    Column("name", String(16), primary_key=True),
    # The highest id of the audit trail that is counted, and the ids below it that may still come.
    Column("position", BigInteger, nullable=False),
    *_json("holes", "tally_cursor", _begins("holes", "["), nullable=False),
    **TABLE_OPTIONS,
)
