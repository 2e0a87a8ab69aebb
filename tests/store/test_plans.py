"""Plans: each hot query follows its index and reads no more rows than it returns, however long the history.

The statements are those the functions send, caught on their way; nothing here repeats a query.
"""

from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import event, insert, text

from orchestrator.jobs import ErrorKind, Queued, Status
from orchestrator.leader import duties
from orchestrator.leader import workflows as leading
from orchestrator.policies import Scope
from orchestrator.settings import Settings
from orchestrator.store import (
    audit,
    backlog,
    blocked,
    crews,
    dead_letters,
    demand,
    dispatch,
    endings,
    flows,
    followers,
    gates,
    gpus,
    job_reads,
    lanes,
    lease_purge,
    lease_reads,
    leases,
    load,
    nodes,
    outbox,
    paging,
    policies,
    registry,
    renewals,
    reports,
    residency,
    retention,
    schedules,
    schema,
    tallies,
    withdraw,
    worker_reads,
    workflows,
)
from orchestrator.store.claim import claim_jobs
from orchestrator.store.database import Database
from orchestrator.store.hot import Hot
from orchestrator.store.job_reads import Filter
from orchestrator.store.settle import End, Outcome, finish_all, record, take_from_dead
from orchestrator.store.submit import Rules, submit_within
from orchestrator.tallies import Ids
from orchestrator.workflows import FlowStatus
from tests.conftest import empty
from tests.factories import POLICY, new_job, rows, rows_read
from tests.store.crowd import HISTORY, LETTERS, crowd


def from_dead(conn, by):
    """As if its worker, who lives, were dead."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nodes, "lives", lambda _conn, _worker_id: False)
        return take_from_dead(conn, by, POLICY, 100)


#: name → (call, index, most rows read)
HOT = {
    "publisher take": (lambda c, _: outbox.take(c, "default", 100), "ix_jobs_queue", 100),
    "urgent": (
        lambda c, _: outbox.take(c, "default", 20, outbox.Urgent(20, 10.0)),
        "ix_jobs_start_by",
        21,  # those that are near, of this lane, and announced ones among them
    ),
    "dispatchable, announced": (lambda c, _: dispatch.look(c, "default", 40), "ix_jobs_queue", 50),  # and then ready
    "dispatchable, ready": (
        lambda c, _: list(dispatch._QUEUES[Queued.READY].rows(c, of_lane="default", most=40)),
        "ix_jobs_queue",
        50,  # and those that are overdue
    ),
    "lock what is fetched": (
        lambda c, _: dispatch._locked(c, [[f"ready-{i:06}" for i in range(16)]]),
        "PRIMARY",
        16,
    ),
    "promote_due": (lambda c, _: outbox.promote_due(c, 100), "ix_jobs_due", 11),
    "announced": (lambda c, _: outbox.announced(c, "default", 5.0, 100), "ix_jobs_queue", 71),
    "claim": (
        lambda c, h: claim_jobs(c, h.by, [f"ready-{i:06}" for i in range(16)], lambda _type: 0),
        "PRIMARY",
        16,
    ),
    "record": (
        lambda c, h: record(
            c,
            h.by,
            [],
            [End(f"mine-{i:06}", 1, Outcome.FAILED, error_kind=ErrorKind.PERMANENT) for i in range(16)],
            POLICY,
        ),
        "PRIMARY",
        16,
    ),
    "jobs of a worker": (
        lambda c, h: from_dead(c, h.by),
        "ix_jobs_status",
        70,  # everything that is owned, at most: never the history
    ),
    "page of all": (lambda c, _: job_reads.page(c, Filter(), 50, None), "ix_jobs_created", 51),
    "page by status": (
        lambda c, _: job_reads.page(c, Filter(status=Status.DONE), 50, None),
        "ix_jobs_status",
        51,
    ),
    "page by workflow": (lambda c, _: job_reads.page(c, Filter(workflow_id="flow"), 50, None), "ix_jobs_workflow", 51),
    "page by agent": (lambda c, _: job_reads.page(c, Filter(agent="agent-3"), 50, None), "ix_jobs_agent", 51),
    "overdue": (lambda c, _: withdraw.expire_overdue(c, 100), "ix_jobs_expiry", 21),  # and those that run, late
    "to stop": (
        lambda c, h: withdraw.to_stop(c, [h.worker_id], [f"mine-{i:06}" for i in range(16)]),
        "PRIMARY",
        16,
    ),
    "lease expiry": (lambda c, _: lease_purge.purge(c, 100), "ix_leases_expiry", 11),
    "worker liveness": (lambda c, _: nodes.declare_lost(c, 60.0, 100), "ix_workers_liveness", 6),
    "waiting at a gate": (
        lambda c, _: blocked.first_rows(c, "capacity", 50, schema.jobs.c.job_id),
        "ix_jobs_blocked",
        50,
    ),
    "units of what is owned": (lambda c, _: gates.owned_units(c, ()), "ix_jobs_status", 70),
    "oldest pending": (lambda c, _: job_reads._oldest_pending_s(c), "ix_jobs_status", 1),
    "jobs to forget": (lambda c, _: retention.forget_jobs(c, Status.DONE, 1800.0), "ix_jobs_status", retention.JOBS),
    "no jobs to forget": (lambda c, _: retention.forget_jobs(c, Status.DONE, 1e7), "ix_jobs_status", 0),
    "workflows to forget": (
        lambda c, _: retention.find_flows(c, FlowStatus.DONE, 1.0),
        "ix_workflows_status",
        retention.FLOWS,
    ),
    "no workflows to forget": (
        lambda c, _: retention.find_flows(c, FlowStatus.DONE, 1e7),
        "ix_workflows_status",
        0,
    ),
    "live slots": (lambda c, _: outbox.live_slots(c, "pool-3"), "PRIMARY", 15),  # its row, and then its workers
    "those who waited": (
        lambda c, _: followers._let_go(c, ["parent-1"]),
        "ix_task_edges_needs",
        6,
    ),
    "workflows past their time": (lambda c, _: flows.overdue(c, 50), "ix_workflows_expiry", 5),
    "workflows to go through": (lambda c, _: flows.swept(c, 50), "ix_workflows_sweep", 5),
    "whether a workflow grows": (lambda c, _: flows.grows(c, "flow-7"), "ix_spawns_workflow", 1),
    "schedules due": (lambda c, _: schedules.due(c, 100), "ix_schedules_due", 11),
    "submit": (
        lambda c, h: submit_within(c, h.db, [new_job(job_id=f"ready-{i:06}") for i in range(16)], Rules(POLICY)),
        "PRIMARY",
        16,
    ),
    "audit of a job": (lambda c, _: audit.of_job(c, "done-000007"), "ix_audit_job", 7),
}


def planned(engine, call, plan):
    """The plan of every SELECT, UPDATE and DELETE that `call` sends, by its text, at the moment when it comes.

    What it did is rolled back.
    """
    plans = {}

    def ask(conn, _cursor, statement, parameters, *_rest):
        if statement.startswith(("SELECT", "UPDATE", "DELETE")) and statement not in plans:
            with closing(conn.connection.cursor()) as cursor:
                plans[statement] = plan(cursor, statement, parameters)

    event.listen(engine, "before_cursor_execute", ask)
    try:
        with engine.connect() as connection:
            call(connection)
            connection.rollback()
    finally:
        event.remove(engine, "before_cursor_execute", ask)
    return plans


def analyze(cursor, statement, parameters):
    """What it reads, by doing it: MariaDB executes what it analyzes."""
    cursor.execute("SAVEPOINT before_it")
    cursor.execute(f"ANALYZE {statement}", parameters)
    names = [column[0] for column in cursor.description]
    steps = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    cursor.execute("ROLLBACK TO SAVEPOINT before_it")
    return steps


def explain(cursor, statement, parameters):
    return " / ".join(step[3] for step in cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))


def analyzed_all(crowded, call, verb="SELECT"):
    """What each of these statements reads, and along which indexes, by its text."""
    plans = planned(crowded.db.engine, call, analyze)
    return {statement: steps for statement, steps in plans.items() if statement.startswith(verb)}


def analyzed(crowded, call, verb="SELECT"):
    """The same of the first."""
    return next(iter(analyzed_all(crowded, call, verb).values()))


@pytest.fixture(scope="module")
def crowded(mariadb_with_tables):
    empty(mariadb_with_tables)
    hand = crowd(mariadb_with_tables)
    names = ", ".join(table.name for table in schema.metadata.sorted_tables)
    with mariadb_with_tables.engine.connect() as connection:
        connection.execute(text(f"ANALYZE TABLE {names}")).all()
    return hand


@pytest.fixture(scope="module")
def crowded_sqlite(sqlite_with_tables, tmp_path_factory):
    """The same in SQLite, and less of it: without statistics, the number of rows changes no plan."""
    path = tmp_path_factory.mktemp("plans") / "copy.db"
    path.write_bytes(sqlite_with_tables.read_bytes())
    db = Database(Settings(database_url=f"sqlite:///{path}"))
    yield crowd(db, history=30, letters=10)
    db.close()


@pytest.mark.parametrize("name", HOT)
def test_a_hot_call_follows_its_indexes_and_reads_little_on_mariadb(crowded, name):
    call, index, most = HOT[name]
    plans = planned(crowded.db.engine, lambda conn: call(conn, crowded), analyze)
    (first,) = next(iter(plans.values()))
    assert first["key"] == index, first
    for statement, steps in plans.items():
        for step in steps:
            assert step["key"] and (step["type"] not in {"ALL", "index"} or name == "page of all"), (statement, step)
            assert statement.startswith("SELECT") or step["key"] == "PRIMARY", (statement, step)
            assert float(step["r_rows"] or 0) <= most, (statement, step)
            # A few rows of two states may be sorted; a backlog may not.
            assert "filesort" not in step["Extra"] or most < 10, (statement, step)


@pytest.mark.parametrize("name", HOT)
def test_a_hot_call_follows_its_indexes_on_sqlite(crowded_sqlite, name):
    call, index, _most = HOT[name]
    plans = planned(crowded_sqlite.db.engine, lambda conn: call(conn, crowded_sqlite), explain)
    first, *_ = plans.values()
    assert (index if index != "PRIMARY" else "sqlite_autoindex") in first, first
    for statement, plan in plans.items():
        assert "SCAN" not in plan or name == "page of all", (statement, plan)
        # By another index it would pass by all that are in the same state.
        assert statement.startswith("SELECT") or "sqlite_autoindex" in plan, (statement, plan)


_ALL = workflows.Filter
#: name → (call, table, its index, most rows read there), of what is asked less often
LED = {
    "workers that read a lane": (lambda c: outbox.live_slots(c, "pool-3"), "workers", "ix_workers_pool", 15),
    "waiting for a pool": (lambda c: demand.of_pools(c, ["default"]), "orchestrator_jobs", "ix_jobs_queue", 257),
    "workers of a pool": (lambda c: demand.of_pools(c, ["pool-3"]), "workers", "ix_workers_pool", 50),
    "warm workers": (lambda c: demand.warm_workers(c, ["pool-3"]), "orchestrator_leases", "ix_leases_worker", 1),
    "orders of a node": (lambda c: crews.orders(c, "node-7"), "pool_assignments", "ix_assignments_node", 20),
    "GPUs of a node": (lambda c: gpus.views(c, 60.0, "node-7"), "gpus", "ix_gpus_node", 8),
    "history of a policy": (
        lambda c: policies.history(c, Scope.AGENT, "agent-7"),
        "policy_history",
        "ix_policy_history_name",
        10,
    ),
    "old results": (lambda c: retention.forget_results(c, 1e7), "orchestrator_results", "ix_results_created", 1),
    "workflows": (lambda c: workflows.page(c, _ALL(), 50, None), "workflows", "ix_workflows_created", 51),
    "workflows of an agent": (
        lambda c: workflows.page(c, _ALL(agent="agent-3"), 50, None),
        "workflows",
        "ix_workflows_agent",
        51,
    ),
}


@pytest.mark.parametrize("name", LED)
def test_a_look_is_led_by_its_index(crowded, name):
    call, table, index, most = LED[name]
    steps = [step for plan in analyzed_all(crowded, call).values() for step in plan if step["table"] == table]
    assert [step["key"] for step in steps] == [index], steps
    assert all(float(step["r_rows"] or 0) <= most for step in steps), steps


#: Indexes that no query is led by, and why they are there.
KEPT = {"idx_leases_agent": "promised to those who read the tables themselves"}


def test_every_index_is_there_for_a_plan_of_these():
    """Each is kept up by every write; those who name one in a table of this file prove it."""
    led = {index for table in (HOT, LETTERS_READ, LEASES_READ, COUNTED) for _, index, _ in table.values()}
    led |= {index for _, _, index, _ in LED.values()}
    known = {index.name for table in schema.metadata.sorted_tables for index in table.indexes}
    assert known - led == KEPT.keys()


#: What leaders ask before they begin anything.
QUESTIONS = {
    f"{module.__name__}.{name}": asked
    for module in (duties, leading)
    for name, asked in vars(module).items()
    if isinstance(asked, Hot)
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_whether_there_is_anything_to_do_is_told_by_the_first_of_it(crowded, name):
    about: dict[str, Any] = {"lock": "leader", "mine": 1, "silent_since_s": -60.0, "ended_since_s": -1e7}
    plan = analyzed(crowded, lambda conn: QUESTIONS[name].rows(conn, **about))
    read = {(step["table"], step["key"]): float(step["r_rows"] or 0) for step in plan}
    assert sum(read.values()) <= 80, read  # everything that is owned, at most: never the backlog or the history


_FLOW = flows.Flow("nobody", "done", 1, 0, 1, 0, None, "a", None)
#: name → (call, most rows read in all), of looks for what is old
FORGETTING = {
    "results": (lambda c: retention.forget_results(c, 0.0), 2 * retention.ROWS),
    "no results": (lambda c: retention.forget_results(c, 1e7), 1),
    "events": (lambda c: retention.forget_events(c, 0.0), 3 * retention.ROWS),
    "no events": (lambda c: retention.forget_events(c, 1e7), 3 * retention.ROWS),
    "tasks of a workflow": (lambda c: retention._letters(c, _FLOW), 1),
    "what is given up": (retention.given_up, 1),
    "leases of jobs": (lambda c: lease_purge.forget_jobs(c, ["nobody", "no-one"]), 3),
}


@pytest.mark.parametrize("name", FORGETTING)
def test_a_look_for_what_is_old_is_bounded_whatever_is_kept(crowded, name):
    call, most = FORGETTING[name]
    for plan in analyzed_all(crowded, call).values():
        read = sum(float(step["r_rows"] or 0) for step in plan)
        assert read <= most, [dict(step) for step in plan]


_AGENT = dead_letters.Filter(agent="agent-3")
#: name → (call, index of the letters, most letters read); a job is read for each, by its key
LETTERS_READ = {
    "untold": (lambda c: dead_letters.untold(c, 100), "ix_dead_letters_entry", 8),
    "page": (lambda c: dead_letters.page(c, dead_letters.Filter(), 50, None), "ix_dead_letters_time", 51),
    # agent-3 has thousands of jobs; every 20th letter is its own.
    "page of an agent": (lambda c: dead_letters.page(c, _AGENT, 10, None), "ix_dead_letters_time", 220),
    "to redrive": (lambda c: dead_letters.look(c, dead_letters.Filter(), None), "ix_dead_letters_time", LETTERS),
    "count of an agent": (lambda c: dead_letters.count(c, _AGENT, 100), "ix_dead_letters_time", 101),
    "count of a type": (
        lambda c: dead_letters.count(c, dead_letters.Filter(type="type-3"), 100),
        "ix_dead_letters_time",
        101,
    ),
    "redrive": (
        lambda c: dead_letters.redrive(c, [f"dead-{i:06}" for i in range(50)], 3, lambda _n: 0.0),
        "PRIMARY",
        50,
    ),
    "purge": (lambda c: dead_letters.purge(c, [f"dead-{i:06}" for i in range(50)]), "PRIMARY", 50),
}


@pytest.mark.parametrize("name", LETTERS_READ)
def test_dead_letters_lead_to_their_jobs_and_never_the_reverse(crowded, name):
    """By an index of the jobs, filters would walk over the history of a type or an agent."""
    call, index, most = LETTERS_READ[name]
    plan = next(plan for statement, plan in analyzed_all(crowded, call).items() if "JOIN" in statement)
    letters, job = plan
    assert (letters["table"], job["table"]) == ("dead_letters", "orchestrator_jobs"), plan
    assert index == letters["key"], dict(letters)
    assert float(letters["r_rows"]) <= most, dict(letters)
    assert (job["type"], job["key"]) == ("eq_ref", "PRIMARY"), dict(job)


_KEYS = [f"{i:064}" for i in range(8)]
#: name → (call, index of the leases, most leases read); their shares are read by the key of each
LEASES_READ = {
    "shares": (lambda c, h: gpus.shares(c, "node-1"), "ix_leases_node", 20),
    "endings": (lambda c, h: endings._shares(c, "node-1"), "ix_leases_node", 20),
    "evicted": (lambda c, h: residency.evicted(c, "node-1", [h.worker_id], ()), "ix_leases_node", 20),
    "idle models of a node": (lambda c, h: residency._idle(c, "node-1"), "ix_leases_node", 20),
    "idle models": (lambda c, h: residency._idle(c, None), "ix_leases_expiry", 400),
    "warm nodes": (lambda c, h: residency.warm_nodes(c, {"m"}), "ix_leases_expiry", 400),
    "unwatched": (lambda c, h: lease_purge._free_unwatched(c, 5.0, 100), "ix_leases_expiry", 11),
    "held": (lambda c, h: leases.free(c, _KEYS), "PRIMARY", 8),
    "page": (lambda c, h: lease_reads.page(c, 50), "ix_leases_expiry", 400),
    "revoked": (lambda c, h: leases.revoke(c, {"GPU-0": "lost"}), "ix_leases_expiry", 400),
}


@pytest.mark.parametrize("name", LEASES_READ)
def test_what_is_over_costs_those_nothing_who_look_for_live_leases(crowded, name):
    call, index, most = LEASES_READ[name]
    plan = analyzed(crowded, lambda conn: call(conn, crowded))
    first, *shares = plan
    assert (first["table"], first["key"]) == ("orchestrator_leases", index), plan
    assert float(first["r_rows"]) <= most, dict(first)
    for step in shares:
        assert (step["table"], step["key"]) == ("lease_gpus", "PRIMARY"), plan
        assert float(step["r_rows"]) <= 1, plan


@pytest.mark.parametrize("name", LEASES_READ)
def test_leases_are_searched_not_scanned_on_sqlite(crowded_sqlite, name):
    call, _index, _most = LEASES_READ[name]
    # Along which index is not said: without statistics, SQLite takes any of those that begin with an equality.
    first, *_ = planned(crowded_sqlite.db.engine, lambda conn: call(conn, crowded_sqlite), explain).values()
    assert "SCAN" not in first
    assert "SEARCH orchestrator_leases USING" in first


@pytest.mark.parametrize("count", [2, 16])
def test_jobs_are_ended_by_their_keys_not_by_a_walk_over_all_that_run(crowded, count):
    """By the index on status, every worker would lock, and wait for, the running jobs of all the others."""
    ends = [End(f"mine-{i:06}", 1, Outcome.DONE, result="{}", run_seconds=1.0) for i in range(count)]
    (step,) = analyzed(crowded, lambda conn: finish_all(conn, crowded.by, ends), verb="UPDATE orchestrator_jobs")
    assert (step["key"], float(step["r_rows"])) == ("PRIMARY", count), step


def test_a_look_for_overruns_reads_what_is_owned_and_never_the_history(crowded):
    owned, worker = analyzed(crowded, lambda conn: reports.overruns(conn, 10.0, 100))
    assert (owned["table"], owned["key"]) == ("orchestrator_jobs", "ix_jobs_status"), dict(owned)
    assert float(owned["r_rows"]) <= 70, dict(owned)
    assert worker["key"] == "PRIMARY", dict(worker)


#: Both walk over what is owned, and find each owner by its key.
OWNERS = {
    "dead owners": lambda c: nodes.dead_owners(c, 500),
    "stale jobs": lambda c: worker_reads.stale_jobs(c, 60.0),
}


@pytest.mark.parametrize("name", OWNERS)
def test_the_dead_are_found_among_what_is_owned_and_never_in_the_history(crowded, name):
    plan = analyzed(crowded, OWNERS[name])
    steps = {step["table"]: step for step in plan}
    owned, owners = steps["orchestrator_jobs"], steps["workers"]
    assert (owned["key"], owned["type"]) == ("ix_jobs_status", "range"), plan
    assert float(owned["r_rows"]) <= 70, plan
    assert (owners["key"], owners["type"]) == ("PRIMARY", "eq_ref"), plan


def test_stale_jobs_are_counted_up_to_a_limit(crowded):
    plan = analyzed(crowded, lambda conn: worker_reads.stale_jobs(conn, 60.0, most=15))
    (owned,) = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert float(owned["r_rows"]) <= 16, plan


def test_a_heartbeat_reads_the_live_leases_of_its_node_and_none_that_are_over(crowded):
    mine = {crowded.worker_id: "node-1"}
    (found,), (step,) = analyzed_all(crowded, lambda conn: renewals.renew_of_workers(conn, mine)).values()
    (old,) = analyzed(crowded, lambda conn: renewals.not_renewed(conn, mine, 5.0))
    for look in (found, old):
        assert (look["key"], float(look["r_rows"])) == ("ix_leases_node", 20), dict(look)
    # By their keys alone: whoever ends a lease changes the index of its node, and would wait for us there.
    assert (step["key"], float(step["r_rows"])) == ("PRIMARY", 15), dict(step)


def idle_lanes(conn, count):
    """Lanes with a history, in which nothing waits any more."""
    names = [f"unused-{number:06}" for number in range(count)]
    ended = {"type": "echo", "payload": "{}", "payload_hash": "0" * 64, "agent": "a", "max_attempts": 5, "rank": 1}
    over = ended | {"status": "cancelled", "queued": None}
    conn.execute(insert(schema.lanes), [{"lane": name} for name in names])
    conn.execute(insert(schema.jobs), [over | {"job_id": f"job-{name}", "lane": name} for name in names])


#: What duties ask on every turn, in which a lane that nobody uses must not count.
LOOKS = {
    "served": lambda conn: lanes.served(conn, Queued.READY),
    "some": lambda conn: lanes.some(conn, "", Queued.READY, Queued.ANNOUNCED),
    "unused": lambda conn: lanes.unused(conn, ""),
    "pools": crews.look,
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_for_work_reads_no_more_rows_for_500_lanes_that_nobody_uses(crowded, name):
    """And of a lane with a backlog one entry of its index, whatever waits there."""
    read = []
    for count in (0, lanes.SOME, lanes.SOME + 500):
        with crowded.db.engine.connect() as conn:
            if count:
                idle_lanes(conn, count)
            before = rows_read(conn)
            LOOKS[name](conn)
            read.append(rows_read(conn) - before)
            conn.rollback()
    assert read[2] <= read[1] + 5, read
    assert read[2] <= 20 * lanes.SOME if name in {"some", "unused"} else read[2] == read[0], read


def test_lanes_with_work_are_those_that_are_served_and_a_few_others_at_a_time(crowded):
    staffed = {worker.pool_id for worker in rows(crowded.db, schema.workers) if worker.status in schema.LIVE_WORKERS}
    assert crowded.db.read(lanes.served) == sorted(staffed) and "pool-0" in staffed
    assert crowded.db.read(lambda conn: lanes.served(conn, Queued.READY)) == ["default"]
    assert crowded.db.read(lambda conn: lanes.some(conn, "", Queued.READY)) == (["default"], "")
    assert crowded.db.read(lambda conn: lanes.waiting(conn, ["default", "idle"], Queued.READY)) == ["default"]


#: name → (call, index, most rows read)
COUNTED = {
    "depth of a lane": (lambda c: gates.waiting_in(c, "default", 100), "ix_jobs_queue", 101),
    "jobs of a status": (lambda c: job_reads._counted(c, Status.DONE, 100), "ix_jobs_status", 101),
    "unfinished": (lambda c: job_reads._unfinished(c, Status.PENDING, 100), "ix_jobs_status", 101),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_count_stops_at_its_limit(crowded, name):
    call, index, most = COUNTED[name]
    plan = analyzed(crowded, call)
    (step,) = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert step["key"] == index, dict(step)
    assert float(step["r_rows"]) <= most, dict(step)


def test_what_is_left_of_a_lane_is_counted_up_to_a_limit(crowded):
    plan = analyzed(crowded, lambda conn: backlog.left(conn, "default", 100))
    steps = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert sorted(step["key"] for step in steps) == ["ix_jobs_queue"] * 3 + ["ix_jobs_status"], plan
    assert all(float(step["r_rows"] or 0) <= 101 for step in steps), plan


def test_depths_pass_the_entries_of_what_waits_and_no_row_and_no_history(crowded):
    plan = analyzed(crowded, lambda conn: backlog.depths(conn, ["default", "idle", "idle-later"]))
    waiting, owned, later = [step for step in plan if step["table"] == "orchestrator_jobs"]
    found = crowded.db.read(lambda conn: backlog.depths(conn, ["default", "idle", "idle-later"]))
    count = sum(depth.due + depth.deferred + depth.delayed + depth.blocked for depth in found.values())
    assert count > HISTORY
    assert (waiting["key"], waiting["type"], float(waiting["r_rows"])) == ("ix_jobs_queue", "range", count), plan
    assert "Using index" in waiting["Extra"] and "filesort" not in waiting["Extra"], dict(waiting)
    assert owned["key"] == "ix_jobs_status" and float(owned["r_rows"]) <= 71, dict(owned)
    assert later["key"] == "ix_jobs_due" and float(later["r_rows"]) <= 511, dict(later)


def test_what_is_deferred_is_looked_for_among_the_soonest(crowded):
    plan = analyzed(crowded, lambda conn: backlog.depths(conn, ["default"], 100))
    (step,) = [step for step in plan if step["key"] == "ix_jobs_due"]
    assert float(step["r_rows"]) <= 101 and "filesort" not in step["Extra"], dict(step)


def test_what_readers_missed_is_looked_for_among_the_soonest(crowded):
    plan = analyzed(crowded, lambda conn: dispatch.missed(conn, "default"))
    (step,) = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert step["key"] == "ix_jobs_due" and float(step["r_rows"]) <= 11, dict(step)
    assert "filesort" not in step["Extra"], dict(step)


def test_what_workers_own_is_counted_among_what_is_owned(crowded):
    (step,) = analyzed(crowded, lambda conn: registry.owned(conn, [crowded.worker_id]))
    assert step["key"] == "ix_jobs_status" and float(step["r_rows"]) <= 71, dict(step)


def test_the_oldest_is_looked_for_among_the_first(crowded):
    plan = analyzed(crowded, lambda conn: backlog.oldest_s(conn, ["default"], look=100))
    steps = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert [step["key"] for step in steps] == ["ix_jobs_queue"] * 2, plan
    assert all(float(step["r_rows"]) <= 101 and "filesort" not in step["Extra"] for step in steps), plan


def test_of_lanes_without_a_label_one_job_each_is_read(crowded):
    plan = analyzed(crowded, lambda conn: backlog.oldest_head_s(conn, ["other"]))
    steps = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert [step["key"] for step in steps] == ["ix_jobs_queue"] * 2, plan
    assert all(float(step["r_rows"] or 0) <= 1 for step in steps), plan


def test_what_is_stuck_is_one_row_of_each_lane(crowded):
    (step,) = analyzed(crowded, lambda conn: backlog.stuck(conn, {"default": 1.0}, ["default"]))
    assert step["key"] == "ix_jobs_queue" and float(step["r_rows"]) <= 1, dict(step)


def test_a_fold_walks_along_the_ids_and_finds_jobs_by_their_keys(crowded):
    first, last = crowded.db.read(
        lambda conn: conn.execute(text("SELECT MIN(id), MAX(id) FROM orchestrator_audit")).one()
    )
    present = analyzed(crowded, lambda conn: tallies._present(conn, schema.audit.c.id > first + 2000, 100))
    assert [(step["key"], float(step["r_rows"])) for step in present if step["table"] == "orchestrator_audit"] == [
        ("PRIMARY", 100)
    ]
    plan = analyzed(crowded, lambda conn: tallies._groups(conn, [Ids(last - 50, last - 1)]))
    steps = {step["table"]: step for step in plan if step["select_type"] == "DERIVED"}
    assert {table: step["key"] for table, step in steps.items()} == dict.fromkeys(
        ("orchestrator_audit", "orchestrator_jobs", "orchestrator_results"), "PRIMARY"
    ), plan
    assert float(steps["orchestrator_audit"]["r_rows"]) <= 50, plan
    before = [step for step in plan if step["table"] == "before"]
    assert before and {step["key"] for step in before} == {"ix_audit_job"}, plan


def test_what_an_autoscaler_is_told_is_counted_up_to_a_limit(crowded):
    plan = analyzed(crowded, lambda conn: conn.execute(load._counts("default", 100)).one())
    steps = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert sorted(step["key"] for step in steps) == ["ix_jobs_due"] + ["ix_jobs_queue"] * 3 + ["ix_jobs_status"] * 2, (
        plan
    )
    assert all(float(step["r_rows"] or 0) <= 101 for step in steps), plan


#: name → (call, most rows read)
LOOKED_AT = {
    "oldest wait": (lambda c: load._oldest_wait_s(c, "default"), load.MOST_ASKED + 1),
    "latency": (lambda c: load._mean_latency_s(c, "default", HISTORY), load.MOST_ENDED + 1),
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_ages_and_latencies_are_those_at_the_head_of_a_lane_and_not_of_its_backlog(crowded, name):
    call, most = LOOKED_AT[name]
    plan = analyzed(crowded, call)
    (step,) = [step for step in plan if step["table"] == "orchestrator_jobs"]
    assert step["key"] == "ix_jobs_queue", dict(step)
    assert float(step["r_rows"]) <= most, dict(step)
    assert "filesort" not in step["Extra"], dict(step)


def test_the_second_page_reads_no_more_than_the_first(crowded):
    for wanted in (Filter(), Filter(status=Status.DONE), Filter(agent="agent-3"), Filter(workflow_id="flow")):
        _, cursor = crowded.db.read(lambda conn, w=wanted: job_reads.page(conn, w, 50, None))
        (step,) = analyzed(crowded, lambda conn, w=wanted, at=cursor: job_reads.page(conn, w, 50, at))
        assert float(step["r_rows"]) <= 110, (wanted, dict(step))


#: Filters of which an index has a part or nothing, and that index. None of them finds a page.
UNLED = {
    "pool": (Filter(pool_id="nowhere"), "ix_jobs_created"),
    "type": (Filter(type="unheard-of"), "ix_jobs_created"),
    "tag": (Filter(tag="unheard-of"), "ix_jobs_created"),
    "pool and type": (Filter(pool_id="default", type="unheard-of"), "ix_jobs_created"),
    "workflow and type": (Filter(workflow_id="flow", type="unheard-of"), "ix_jobs_workflow"),
    "agent and type": (Filter(agent="agent-3", type="unheard-of"), "ix_jobs_agent"),
    "agent and status": (Filter(agent="agent-3", status=Status.FAILED), "ix_jobs_agent"),
    "agent and what is owned": (Filter(agent="agent-99", status=Status.RUNNING), "ix_jobs_status"),
    "workflow, tag and status": (
        Filter(workflow_id="flow", tag="unheard-of", status=Status.SKIPPED),
        "ix_jobs_workflow",
    ),
    "status and pool": (Filter(status=Status.DONE, pool_id="nowhere"), "ix_jobs_status"),
}


@pytest.mark.parametrize("name", UNLED)
def test_a_page_of_what_no_index_has_looks_at_a_window(crowded, monkeypatch, name):
    """The first page and the second: as many entries of an index, and no more rows than that."""
    monkeypatch.setattr(paging, "WINDOW", 150)
    wanted, index = UNLED[name]
    found, cursor = crowded.db.read(lambda conn: job_reads.page(conn, wanted, 50, None))
    assert found == []
    for at in (None, cursor):
        plans = [*analyzed_all(crowded, lambda conn, at=at: job_reads.page(conn, wanted, 50, at)).values()]
        assert [step["key"] for (step,) in plans] == [index] * 2, plans
        assert "Using index" in plans[0][0]["Extra"], plans  # no row is read for the end of the window
        assert all("filesort" not in step["Extra"] for (step,) in plans), plans
        assert all(float(step["r_rows"] or 0) <= 151 for (step,) in plans), plans


@pytest.mark.parametrize("name", UNLED)
def test_a_page_of_what_no_index_has_follows_one_on_sqlite(crowded_sqlite, monkeypatch, name):
    """By the index of its lane, say, all of that would be sorted."""
    monkeypatch.setattr(paging, "WINDOW", 5)
    wanted, index = UNLED[name]
    plans = planned(crowded_sqlite.db.engine, lambda conn: job_reads.page(conn, wanted, 50, None), explain)
    assert len(plans) == 2
    for plan in plans.values():
        assert index in plan.split(" / ")[0]
        # Jobs of one moment may be sorted.
        assert "B-TREE FOR ORDER BY" not in plan
