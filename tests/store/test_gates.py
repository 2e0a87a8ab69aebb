"""Gates on real databases: who is refused, who waits, and who is let go when."""

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from sqlalchemy import select, update

from orchestrator.errors import OrchestratorError
from orchestrator.jobs import ErrorKind, Status
from orchestrator.policies import AgentPolicy, CapPolicy, PausePolicy, Scope, parse
from orchestrator.store import caps, dead_letters, entrance, gatekeeper, gates, outbox, policies, schema, withdraw
from orchestrator.store.entrance import Entrance
from orchestrator.store.gates import Measured
from orchestrator.store.submit import Verdict, submit_jobs
from tests.factories import POLICY, gpu, hire, new_job, now, row, rows, set_job, traffic

NOON = datetime(2026, 1, 5, 12)  # noqa: DTZ001 - the database's clock has no zone
NIGHT = datetime(2026, 1, 5, 23)  # noqa: DTZ001
NIGHTS = [{"from": "22:00", "to": "06:00"}]


@pytest.fixture(autouse=True)
def _each_look_is_new(monkeypatch):
    monkeypatch.setattr(entrance, "FRESH_S", 0.0)
    monkeypatch.setattr(entrance, "KEEP_FACTOR", 0)


class Door:
    """Submits through the gates, and tends them as the leader does."""

    def __init__(self, db):
        self.db = db
        self.entrance = Entrance()

    def policy(self, **fields):
        document = parse(Scope.ADMISSION, fields)
        self.db.write(lambda conn: policies.put(conn, Scope.ADMISSION, "global", document))

    def limit(self, agent, **fields):
        self.db.write(lambda conn: policies.put(conn, Scope.AGENT, agent, AgentPolicy(**fields)))

    def write(self, scope, name, document):
        self.db.write(lambda conn: policies.put(conn, scope, name, document))

    def admit(self, conn, fresh):
        return self.entrance.admit(conn, policies.read_book(conn), fresh)

    def submit(self, count=1, **fields):
        """Codes of those that were refused, ids of those that were not, in order."""
        batch = [new_job(**fields) for _ in range(count)]
        answers = submit_jobs(self.db, batch, POLICY, admit=self.admit)
        return [
            answer.code if isinstance(answer, OrchestratorError) else job.job_id
            for job, answer in zip(batch, answers, strict=True)
        ]

    def tend(self, at=None, used_pct=10.0, load_pct=50.0):
        seen = Measured(at or now(self.db), used_pct, load_pct)
        freed = self.db.write(lambda conn: gatekeeper.tend(conn, policies.read_book(conn), seen))
        return [job.job_id for job in freed]

    def promote(self):
        return self.db.write(lambda conn: outbox.promote_due(conn, 10, policies.read_book(conn)))

    def state(self, name):
        found = self.db.read(gates.states).get(name)
        return None if found is None else found.state

    def waits(self, *job_ids):
        return [row(self.db, job_id).blocked_on for job_id in job_ids]


@pytest.fixture
def door(db):
    return Door(db)


def run(hand, *job_ids):
    hand.finish(*hand.claim(*job_ids))


# --- nothing configured ---


def test_without_policies_nothing_is_asked(db):
    step, book = Entrance(), db.read(policies.read_book)
    with traffic(db) as seen:
        assert len(db.write(lambda conn: step.admit(conn, book, [new_job(), new_job(cost_units=5)]))) == 2
    assert [s for s in seen.statements if not s.startswith("BEGIN")] == []


# --- pauses ---


def test_a_pause_refuses_or_takes_what_is_submitted(door):
    def pause(**fields):
        door.db.write(lambda conn: policies.put(conn, Scope.PAUSE, "agent:a", PausePolicy(**fields)))

    pause(reason="upgrade")
    assert door.submit(agent="a") == ["paused"]
    assert door.submit(agent="b") != ["paused"]
    pause(action="queue")
    assert door.submit(agent="a") != ["paused"]
    assert len(rows(door.db, schema.jobs)) == 2


# --- GPU memory ---


def test_the_memory_gate_refuses_while_nobody_knows_how_full_gpus_are(door):
    door.policy(gpu_memory={"over_pct": 90})
    assert door.submit() == ["gate_closed"]  # nobody has looked
    door.tend(used_pct=None)
    assert door.submit() == ["gate_closed"]  # nobody can tell
    door.tend(used_pct=50)
    (job_id,) = door.submit()
    assert row(door.db, job_id).queued == "ready"
    look = update(schema.gate_states).values(looked_at=now(door.db) - timedelta(seconds=gates.STALE_STATE_S + 5))
    door.db.write(lambda conn: conn.execute(look))
    assert door.submit() == ["gate_closed"]  # nobody looks any more
    assert len(rows(door.db, schema.jobs)) == 1


def test_the_memory_gate_remembers_across_leaders(door):
    door.policy(gpu_memory={"over_pct": 90, "for_seconds": 60})
    start = now(door.db)
    for after, used, closed in ((0, 95, False), (59, 95, False), (60, 95, True), (61, 89, True), (62, 84, False)):
        door.tend(start + timedelta(seconds=after), used_pct=used)
        assert door.state("gate:gpu_memory").closed == closed, after
    door.policy()
    door.tend()
    assert door.state("gate:gpu_memory") is None


def test_what_the_memory_gate_keeps_is_let_go_when_it_opens(door):
    door.policy(gpu_memory={"over_pct": 90, "action": "queue"})
    door.tend(used_pct=95)
    ids = door.submit(3) + door.submit(min_memory_mb=0)
    assert door.waits(*ids) == ["gate:gpu_memory"] * 3 + [None]
    assert "95 %" in row(door.db, ids[0]).wait_reason
    assert door.tend(used_pct=95) == []
    assert door.tend(used_pct=20) == ids[:3]
    assert [row(door.db, job_id).queued for job_id in ids] == ["ready"] * 4
    assert row(door.db, ids[0]).wait_reason is None


def test_the_memory_gate_sends_to_the_cpu_those_who_allow_it(door):
    door.policy(gpu_memory={"over_pct": 90, "action": "cpu"})
    door.tend(used_pct=95)
    (job_id,) = door.submit(min_memory_mb=500, cpu_fallback=True)
    assert (row(door.db, job_id).min_memory_mb, row(door.db, job_id).queued) == (0, "ready")
    assert door.submit(min_memory_mb=500) == ["gate_closed"]


def measured(db):
    found = db.read(lambda conn: gates.measured(conn, 30.0))
    return found.used_pct, found.load_pct


def test_what_is_measured(db):
    hand = hire(db, gpu(0, used_mb=12288, utilization=30.0), gpu(1, utilization=50.0))
    assert measured(db) == (25.0, 40.0)
    hand.sees(gpu(0, used_mb=12288))
    assert measured(db)[0] == 25.0
    old = update(schema.gpus).values(sampled_at=now(db) - timedelta(seconds=60))
    db.write(lambda conn: conn.execute(old))
    assert measured(db) == (None, None)


# --- queue depth ---


def test_a_full_lane_refuses_with_its_numbers_and_loses_nothing(door):
    door.policy(queue_depth={"max": 5, "lanes": {"big": 8}})
    answers = door.submit(7)
    assert answers[5:] == ["queue_full"] * 2
    assert door.submit(9, pool_id="big")[8:] == ["queue_full"]
    later = (now(door.db) + timedelta(days=1)).isoformat() + "Z"
    assert door.submit(earliest_start_at=later) != ["queue_full"]
    assert len(rows(door.db, schema.jobs)) == 14
    run(hire(door.db), answers[0])
    assert door.submit() != ["queue_full"]


def test_one_look_counts_what_it_let_in(door, monkeypatch):
    monkeypatch.setattr(entrance, "FRESH_S", 60.0)
    door.policy(queue_depth={"max": 5})
    assert [*door.submit(3), *door.submit(3)].count("queue_full") == 1
    assert door.submit(2) == ["queue_full"] * 2


def test_a_full_lane_keeps_the_rest_and_lets_go_as_many_as_fit(door):
    door.policy(queue_depth={"max": 3, "action": "queue"})
    ids = door.submit(8)
    assert door.waits(*ids) == [None] * 3 + ["gate:queue_depth:default"] * 5
    assert door.tend() == []
    run(hire(door.db), *ids[:2])
    assert door.tend() == ids[3:5]
    door.policy()
    assert door.tend() == ids[5:]


# --- watermarks ---


def test_an_agent_has_at_most_so_many_jobs_in_flight(door):
    door.limit("a", max_in_flight=10, low_in_flight=7)
    hand = hire(door.db)
    ids = door.submit(12, agent="a")
    assert ids[10:] == ["agent_limit"] * 2
    assert door.submit(agent="b") != ["agent_limit"]
    run(hand, *ids[:2])
    # Below the high mark, but it closed, and is not below the low one.
    assert door.submit(agent="a") == ["agent_limit"]
    door.tend()
    assert door.state("agent-limit:a").closed
    run(hand, ids[2])
    door.tend()
    assert door.state("agent-limit:a") is None
    assert door.submit(4, agent="a")[3:] == ["agent_limit"]


def test_jobs_that_ended_do_not_count_however_many_there_were(door):
    door.limit("*", max_in_flight=3)
    hand = hire(door.db)
    for _ in range(10):
        (job_id,) = door.submit(agent="a")
        assert job_id != "agent_limit"
        run(hand, job_id)
    assert door.state("agent-limit:a") is None


def test_an_agents_jobs_above_its_mark_wait_and_are_let_go(door):
    door.limit("a", max_in_flight=4, action="queue")
    hand, ids = hire(door.db), door.submit(7, agent="a")
    assert door.waits(*ids) == [None] * 4 + ["agent-limit:a"] * 3
    assert door.tend() == []
    run(hand, ids[0])
    assert door.tend() == ids[4:5]
    assert door.tend() == []
    run(hand, *ids[1:5])
    assert door.tend() == ids[5:]


def test_an_agents_delayed_jobs_above_its_mark_wait_when_they_are_due(door):
    door.limit("a", max_in_flight=2, action="queue")
    hand, soon = hire(door.db), (now(door.db) + timedelta(hours=1)).isoformat() + "Z"
    ids = door.submit(4, agent="a", earliest_start_at=soon)
    for job_id in ids:
        set_job(door.db, job_id, not_before=NOON - timedelta(days=400))
    assert door.promote() == 4
    assert door.waits(*ids) == [None, None, "agent-limit:a", "agent-limit:a"]
    assert door.tend() == []
    run(hand, *ids[:2])
    assert door.tend() == ids[2:]


def test_an_agents_job_that_was_counted_goes_on_to_the_next_gate_when_it_is_due(door):
    door.policy(capacity={"units": 10})
    door.limit("a", max_in_flight=2, action="queue")
    soon = (now(door.db) + timedelta(hours=1)).isoformat() + "Z"
    (job_id,) = door.submit(agent="a", cost_units=5, earliest_start_at=soon)
    set_job(door.db, job_id, not_before=NOON - timedelta(days=400))
    door.promote()
    assert door.waits(job_id) == ["capacity"]


def test_no_agent_is_behind_so_many_others_that_nobody_looks_at_it(door, monkeypatch):
    monkeypatch.setattr(gatekeeper, "MOST_KEYS", 2)
    door.limit("*", max_in_flight=1, action="queue")
    waiting = [door.submit(2, agent=name)[1] for name in ("a", "b", "c")]
    door.limit("c", max_in_flight=2)
    facts, walk = Measured(now(door.db), 10.0, 50.0), gatekeeper.Walk()

    def tend(conn):
        return [job.job_id for job in gatekeeper.tend(conn, policies.read_book(conn), facts, walk)]

    assert [door.db.write(tend) for _ in range(3)] == [[], waiting[2:], []]


def test_an_agents_leases_close_its_gate(door):
    door.limit("a", max_memory_mb=1000, low_memory_mb=500)
    hand = hire(door.db, gpu())
    ids = door.submit(2, agent="a", min_memory_mb=800)
    claims = hand.claim(*ids)
    assert door.submit(agent="a", min_memory_mb=800) == ["agent_limit"]
    assert door.submit(agent="a", min_memory_mb=0) != ["agent_limit"]
    hand.finish(claims[0])
    door.tend()
    assert door.submit(agent="a", min_memory_mb=800) == ["agent_limit"]  # 800 is above the low mark
    hand.finish(claims[1])
    door.tend()
    assert door.submit(agent="a", min_memory_mb=800) != ["agent_limit"]


# --- units ---


def test_units_in_use_never_exceed_the_capacity(door):
    door.policy(capacity={"units": 10})
    hand, ids = hire(door.db), [door.submit(cost_units=cost)[0] for cost in (4, 5, 3, 1)]
    assert door.waits(*ids) == ["capacity"] * 4
    # The third does not fit, and nobody overtakes it.
    assert door.tend() == ids[:2]
    assert door.tend() == []
    assert "9 of 10" in door.state("capacity").reason
    claims = hand.claim(*ids[:2])
    assert door.tend() == []
    hand.fail(claims[0])  # it runs again, and holds its units meanwhile
    assert door.tend() == []
    hand.finish(claims[1])
    assert door.tend() == ids[2:]
    assert "8 of 10" in door.state("capacity").reason


def test_jobs_that_ran_before_there_was_a_capacity_count(door):
    hand, (job_id,) = hire(door.db), door.submit(cost_units=8)
    (claim,) = hand.claim(job_id)
    door.policy(capacity={"units": 10})
    (other,) = door.submit(cost_units=3)
    assert door.tend() == []
    hand.finish(claim)
    assert door.tend() == [other]


def test_who_costs_more_than_there_is_now_waits_for_quiet_and_holds_up_nobody(door):
    door.policy(capacity={"units": 10, "quiet_units": 50, "quiet": NIGHTS})
    (large,), (small,) = door.submit(cost_units=30), door.submit(cost_units=5)
    assert door.submit(cost_units=51) == ["invalid_input"]
    assert door.tend(NOON) == [small]
    assert door.waits(large) == ["capacity:large"]
    assert door.tend(NIGHT) == [large]


def test_a_retry_keeps_its_units_and_a_delayed_job_asks_for_them_when_it_is_due(door):
    door.policy(capacity={"units": 10})
    hand, (kept,) = hire(door.db), door.submit(cost_units=6)
    soon = (now(door.db) + timedelta(hours=1)).isoformat() + "Z"
    (later,) = door.submit(cost_units=6, earliest_start_at=soon)
    door.tend()
    hand.fail(*hand.claim(kept))
    for job_id in (kept, later):
        assert row(door.db, job_id).queued == "delayed"
        set_job(door.db, job_id, not_before=NOON - timedelta(days=400))
    assert door.promote() == 2
    assert [row(door.db, job_id).queued for job_id in (kept, later)] == ["ready", "blocked"]
    assert door.tend() == []
    run(hand, kept)
    assert door.tend() == [later]


def test_cancelled_jobs_give_their_units_back(door):
    door.policy(capacity={"units": 10})
    first, second = door.submit(2, cost_units=8)
    door.tend()
    door.db.write(lambda conn: withdraw.cancel(conn, first))
    assert door.tend() == [second]


# --- quiet ---


def test_a_quiet_job_waits_for_its_hours(door):
    door.policy(capacity={"units": 10, "quiet": NIGHTS})
    (job_id,), (other,) = door.submit(constraints={"quiet": True}), door.submit()
    assert door.waits(job_id, other) == ["quiet", None]
    assert door.tend(NOON) == []
    assert door.tend(NIGHT) == [job_id]
    run(hire(door.db), job_id)
    assert row(door.db, job_id).status == Status.DONE
    door.tend(NIGHT)
    assert rows(door.db, schema.gate_holds) == []


def test_who_was_let_go_and_has_not_started_waits_again_when_quiet_ends(door):
    door.policy(capacity={"units": 10, "quiet": NIGHTS})
    waits, runs = door.submit(2, constraints={"quiet": True}, cost_units=2)
    assert door.tend(NIGHT) == [waits, runs]
    hand = hire(door.db)
    (claim,) = hand.claim(runs)
    door.db.write(lambda conn: outbox.take(conn, "default", 1))
    door.tend(NOON)
    assert (row(door.db, waits).queued, row(door.db, waits).blocked_on) == ("blocked", "quiet")
    assert row(door.db, runs).status == Status.CLAIMED
    assert "2 of 10" in door.state("capacity").reason
    hand.finish(claim)
    assert door.tend(NIGHT) == [waits]


def test_a_quiet_job_that_becomes_due_still_waits_for_quiet(door):
    (job_id,) = door.submit(constraints={"quiet": True}, earliest_start_at="2999-01-01T00:00:00Z")
    assert row(door.db, job_id).queued == "delayed"
    set_job(door.db, job_id, not_before=NOON - timedelta(days=400))
    door.promote()
    assert door.waits(job_id) == ["quiet"]


def test_low_load_is_quiet_after_a_while_and_unknown_load_never(door):
    door.policy(capacity={"units": 10, "follow_load": True, "load_below_pct": 20, "load_for_seconds": 60})
    (job_id,) = door.submit(constraints={"quiet": True})
    start = now(door.db)
    for after, load in ((0, 5.0), (59, 5.0), (60, None), (61, 5.0), (120, 5.0)):
        assert door.tend(start + timedelta(seconds=after), load_pct=load) == []
    assert door.tend(start + timedelta(seconds=121), load_pct=5.0) == [job_id]


def test_without_quiet_hours_it_waits_and_says_why(door):
    (job_id,) = door.submit(constraints={"quiet": True})
    assert door.tend() == []
    assert row(door.db, job_id).wait_reason


# --- one behind the other ---


def test_a_job_meets_one_gate_after_the_other(door):
    door.limit("a", max_in_flight=1, action="queue")
    door.policy(gpu_memory={"over_pct": 90, "action": "queue"}, capacity={"units": 10, "quiet": NIGHTS})
    door.tend(NOON, used_pct=99)
    first, job_id = door.submit(2, agent="a", constraints={"quiet": True}, cost_units=10)
    seen = door.waits(first, job_id)
    door.db.write(lambda conn: withdraw.cancel(conn, first))
    door.tend(NOON, used_pct=99)
    seen += door.waits(job_id)
    door.tend(NOON, used_pct=1)
    seen += door.waits(job_id)
    assert door.tend(NIGHT, used_pct=1) == [job_id]
    assert seen == ["gate:gpu_memory", "agent-limit:a", "gate:gpu_memory", "quiet"]
    held = select(schema.gate_holds.c.gate).where(schema.gate_holds.c.job_id == job_id)
    assert set(door.db.read(lambda conn: conn.execute(held).scalars().all())) == {"agent-limit:a", "quiet", "capacity"}


def test_many_jobs_at_the_gates_cost_few_statements(door):
    door.policy(capacity={"units": 100, "quiet": NIGHTS})
    door.submit(400, cost_units=0.1)
    with traffic(door.db) as seen:
        assert len(door.tend()) == 400
    assert len(seen.statements) < 25, seen.statements
    with traffic(door.db) as idle:
        assert door.tend() == []
    assert len(idle.statements) < 25, idle.statements


def test_the_same_job_again_is_no_new_one_at_a_closed_gate(door):
    job = new_job(job_id="j")
    assert submit_jobs(door.db, [job], POLICY, admit=door.admit) == [Verdict.CREATED]
    door.policy(queue_depth={"max": 1})
    assert submit_jobs(door.db, [job], POLICY, admit=door.admit) == [Verdict.EXISTS]


def test_a_job_that_is_started_over_meets_the_gates_again(door):
    door.policy(capacity={"units": 10})
    hand, ids = hire(door.db), door.submit(2, cost_units=8)
    door.tend()
    (claim,) = hand.claim(ids[0])
    hand.fail(claim, ErrorKind.PERMANENT)
    assert door.tend() == ids[1:]
    door.db.write(lambda conn: dead_letters.redrive_one(conn, ids[0], 3))
    assert row(door.db, ids[0]).queued == "delayed"
    set_job(door.db, ids[0], not_before=NOON - timedelta(days=400))
    door.promote()
    assert door.tend() == []
    run(hand, ids[1])
    assert door.tend() == ids[:1]


def test_small_jobs_from_elsewhere_do_not_take_units_from_under_a_large_one(door):
    door.policy(capacity={"units": 10, "quiet": NIGHTS})
    hand, (running, large) = hire(door.db), [door.submit(cost_units=cost)[0] for cost in (5, 8)]
    assert door.tend(NOON) == [running]
    (small,) = door.submit(cost_units=2, constraints={"quiet": True})
    assert door.tend(NIGHT) == []
    assert door.waits(large, small) == ["capacity", "capacity"]
    run(hand, running)
    assert door.tend(NIGHT) == [large, small]


def test_a_quiet_job_that_is_tried_again_does_not_pay_twice(door):
    door.policy(capacity={"units": 10, "quiet": NIGHTS})
    hand, (job_id,) = hire(door.db), door.submit(cost_units=8, constraints={"quiet": True})
    door.tend(NIGHT)
    (claim,) = hand.claim(job_id)
    hand.fail(claim)
    set_job(door.db, job_id, not_before=NOON - timedelta(days=400))
    door.promote()
    assert door.waits(job_id) == ["quiet"]
    assert door.tend(NIGHT) == [job_id]
    assert "8 of 10" in door.state("capacity").reason


def test_many_submits_at_once_meet_the_same_marks(maria_db, monkeypatch):
    """Each instance decides by what it saw a moment ago: what is let in too much is what was under way then."""
    monkeypatch.setattr(entrance, "FRESH_S", 0.05)
    doors, batch = [Door(maria_db) for _ in range(4)], 5
    doors[0].limit("a", max_in_flight=100)
    doors[0].policy(queue_depth={"max": 10_000}, capacity={"units": 50})

    def flood(door):
        answers = [door.submit(batch, agent="a", cost_units=0.5) for _ in range(20)]
        return [answer for some in answers for answer in some]

    with ThreadPoolExecutor(5) as threads:
        floods = [threads.submit(flood, door) for door in doors]
        freed = [job_id for _ in range(10) for job_id in doors[0].tend()]
        answers = [answer for one in floods for answer in one.result()]
    accepted = [answer for answer in answers if answer != "agent_limit"]
    assert len(rows(maria_db, schema.jobs)) == len(accepted) >= 100
    monkeypatch.setattr(entrance, "FRESH_S", 0.0)
    assert [Door(maria_db).submit(agent="a") for _ in doors] == [["agent_limit"]] * 4
    freed += doors[0].tend()
    assert len(freed) == len(set(freed)) == min(len(accepted), 100)
    assert doors[0].tend() == []


# --- units and what else keeps a job ---


def publish(db):
    def work(conn):
        return outbox.take(conn, "default", 10, caps=caps.Glance(conn, policies.read_book(conn)))

    return [job.job_id for job in db.write(work)]


def keep_caps(db):
    return db.write(lambda conn: caps.let_go(conn, policies.read_book(conn), "", 100))


@pytest.mark.parametrize("key", ["pool:chat", "agent:a"])
def test_what_is_paused_takes_no_units_from_others(door, key):
    door.policy(capacity={"units": 10})
    door.write(Scope.PAUSE, key, PausePolicy(action="queue"))
    (paused,) = door.submit(agent="a", pool_id="chat", cost_units=8)
    (other,) = door.submit(agent="b", cost_units=8)
    assert door.tend() == [other]
    run(hire(door.db), other)
    assert door.tend() == []
    door.db.write(lambda conn: policies.remove(conn, Scope.PAUSE, key))
    keep_caps(door.db)
    assert door.tend() == [paused]


def test_what_is_paused_after_it_was_let_go_gives_its_units_back(door):
    door.policy(capacity={"units": 10})
    (paused,) = door.submit(pool_id="chat", cost_units=8)
    assert door.tend() == [paused]
    door.write(Scope.PAUSE, "pool:chat", PausePolicy(action="queue"))
    (other,) = door.submit(cost_units=8)
    assert door.tend() == [other]
    assert door.waits(paused) == ["gate:lane:chat"]
    run(hire(door.db), other)
    door.db.write(lambda conn: policies.remove(conn, Scope.PAUSE, "pool:chat"))
    assert door.tend() == [paused]


def test_what_waits_for_a_cap_holds_no_units_and_asks_for_them_again(door):
    door.policy(capacity={"units": 10})
    first, second = door.submit(2, agent="a", cost_units=4)
    assert door.tend() == [first, second]
    door.write(Scope.CONCURRENCY, "agent:a", CapPolicy(max=1))
    hand = hire(door.db)
    hand.book = door.db.read(policies.read_book)
    (claim,) = hand.claim(first)
    publish(door.db)
    assert door.waits(second) == ["cap:agent:a"]
    (large,) = door.submit(agent="b", cost_units=6)
    assert door.tend() == [large]
    hand.finish(claim)
    keep_caps(door.db)
    assert door.waits(second) == ["capacity"]
    assert door.tend() == [second]  # 6 + 4
    assert "10 of 10" in door.state("capacity").reason


def test_who_would_find_no_seat_waits_for_that_and_not_with_units_in_hand(door):
    door.policy(capacity={"units": 10})
    door.write(Scope.CONCURRENCY, "agent:a", CapPolicy(max=1))
    ids = door.submit(3, agent="a", cost_units=4)
    (other,) = door.submit(agent="b", cost_units=4)
    assert door.tend() == [ids[0], other]
    assert door.waits(*ids[1:]) == ["cap:agent:a"] * 2


def test_a_quiet_job_that_waited_for_a_cap_waits_for_quiet_again(door):
    door.policy(capacity={"units": 10, "quiet": NIGHTS})
    door.write(Scope.CONCURRENCY, "agent:a", CapPolicy(max=1))
    ids = door.submit(2, agent="a", constraints={"quiet": True})
    hand = hire(door.db)
    hand.book = door.db.read(policies.read_book)
    assert door.tend(NIGHT) == ids[:1]
    hand.finish(*hand.claim(ids[0]))
    keep_caps(door.db)
    assert door.waits(ids[1]) == ["quiet"]
    assert door.tend(NOON) == []
    assert door.tend(NIGHT) == ids[1:]
