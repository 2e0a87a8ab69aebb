"""Gates: what they decide, and that they neither flap nor open by not knowing."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import admission
from orchestrator.admission import Admitted
from orchestrator.errors import InvalidInput, OrchestratorError
from orchestrator.gates import (
    AGENT,
    CAPACITY,
    LARGE,
    MARGIN_PCT,
    MEMORY,
    QUIET,
    Asked,
    GateState,
    Quiet,
    Standing,
    Use,
    Waiting,
    agent_gate,
    load_gate,
    memory_gate,
    over_mark,
    quiet_now,
)
from orchestrator.policies import AgentPolicy, Book, PausePolicy, QuietHours, Scope, parse

START = datetime(2026, 1, 5, 12)  # noqa: DTZ001 - the database's clock has no zone; a Monday
CLOSED = GateState(closed=True, since=START, reason="95 % is used")
PERCENTAGES = st.one_of(st.none(), st.floats(0, 100))
SO = Quiet(so=True, reason="")
#: What they answer has many types, and a test knows which one it means.
decide: Any = admission.decide
go_on: Any = admission.go_on


def gates(**fields):
    return parse(Scope.ADMISSION, fields)


def book(agents=None, pauses=None, **fields):
    return Book(agents=agents or {}, pauses=pauses or {}, admission=gates(**fields))


def seconds(count):
    return START + timedelta(seconds=count)


# --- GPU memory ---


@given(st.lists(PERCENTAGES, max_size=60), st.floats(10, 100), st.integers(0, 5))
def test_the_memory_gate_closes_after_its_time_and_opens_below_its_margin(samples, over, patience):
    policy = gates(gpu_memory={"over_pct": over, "for_seconds": patience}).gpu_memory
    state, run = None, 0
    for n, used in enumerate(samples):
        before, state = state, memory_gate(policy, state, used, seconds(n))
        run = run + 1 if used is not None and used > over else 0
        if used is None:
            assert state.closed and "no GPU" in state.reason
        elif run > patience:
            assert state.closed
        elif used <= over - MARGIN_PCT or (before is not None and not before.closed and not run):
            assert not state.closed


@given(st.floats(20, 95), st.lists(st.floats(-MARGIN_PCT + 0.01, MARGIN_PCT), min_size=1, max_size=50))
def test_the_memory_gate_does_not_flap_around_its_limit(over, wobbles):
    policy = gates(gpu_memory={"over_pct": over}).gpu_memory
    state = memory_gate(policy, None, over + 1, START)
    assert state.closed
    for n, wobble in enumerate(wobbles):
        state = memory_gate(policy, state, over + wobble, seconds(n))
        assert state.closed


def test_what_becomes_known_and_is_low_opens():
    policy = gates(gpu_memory={"over_pct": 90, "for_seconds": 30}).gpu_memory
    unknown = memory_gate(policy, None, None, START)
    assert not memory_gate(policy, unknown, 88.0, seconds(1)).closed
    # It was never open since, and is too full now: nobody waits for the thirty seconds.
    assert memory_gate(policy, unknown, 95.0, seconds(1)).closed


def test_only_jobs_that_need_memory_meet_the_memory_gate():
    for state in (CLOSED, None):
        standing = Standing(book(gpu_memory={"over_pct": 90}), state)
        assert decide(Asked(), standing).code == "gate_closed"
        assert isinstance(decide(Asked(needs_memory=False), standing), Admitted)
    assert isinstance(decide(Asked(), Standing(book(gpu_memory={"over_pct": 90}), GateState(closed=False))), Admitted)


# --- what a closed gate does ---

SHUT = {
    "gate_closed": ({"gpu_memory": {"over_pct": 90}}, MEMORY),
    "queue_full": ({"queue_depth": {"max": 5}}, "gate:queue_depth:default"),
    "agent_limit": ({}, f"{AGENT}me"),
}


def shut(code, action):
    """A standing in which one gate is closed to the agent `me`."""
    policy, key = SHUT[code]
    policy = {name: fields | {"action": action} for name, fields in policy.items()}
    limited = {"me": AgentPolicy(max_in_flight=3, action=action)} if code == "agent_limit" else {}
    standing = Standing(book(limited, **policy), CLOSED, {"default": Waiting(5)}, {"me": Use(jobs=3)})
    return standing, key


@pytest.mark.parametrize("code", SHUT)
@pytest.mark.parametrize("cpu_fallback", [False, True])
def test_a_closed_gate_does_what_its_action_says(code, cpu_fallback):
    asked = Asked(agent="me", cpu_fallback=cpu_fallback)
    standing, key = shut(code, "reject")
    refused = decide(asked, standing)
    assert refused.code == code and refused.retry_after_s > 0
    standing, key = shut(code, "queue")
    waits = decide(asked, standing)
    assert isinstance(waits, Admitted) and waits.blocked_on == key and waits.reason
    standing, key = shut(code, "cpu")
    answer = decide(asked, standing)
    if cpu_fallback:
        assert answer == Admitted(on_cpu=True)
    else:
        assert isinstance(answer, OrchestratorError) and answer.code == code


def test_a_refusal_comes_before_a_wait():
    standing = Standing(
        book(queue_depth={"max": 1, "action": "queue"}, gpu_memory={"over_pct": 90}), CLOSED, {"default": Waiting(1)}
    )
    assert decide(Asked(), standing).code == "gate_closed"
    assert decide(Asked(needs_memory=False), standing).blocked_on == "gate:queue_depth:default"


def test_the_numbers_are_told_and_the_time_follows_the_speed_of_the_lane():
    standing = Standing(book(queue_depth={"max": 9, "lanes": {"big": 100}}), lanes={"big": Waiting(120, 2.0)})
    refused = decide(Asked(lane="big"), standing)
    assert "120" in refused.message and "100" in refused.message
    assert refused.retry_after_s == pytest.approx(10.5)
    assert isinstance(decide(Asked(lane="other"), standing), Admitted)


@given(st.integers(1, 20), st.integers(0, 60))
def test_never_more_than_the_limit_is_let_in_by_one_look(limit, flood):
    standing = Standing(book({"a": AgentPolicy(max_in_flight=limit)}, queue_depth={"max": limit}))
    answers = [decide(Asked(agent="a" if n % 2 else "b"), standing) for n in range(flood)]
    assert sum(isinstance(answer, Admitted) for answer in answers) == min(limit, flood)


# --- watermarks ---


@given(st.integers(1, 200), st.lists(st.integers(0, 250), max_size=50))
def test_an_agents_gate_is_closed_from_its_high_mark_to_its_low_one(high, counts):
    policy = AgentPolicy(max_in_flight=high)
    closed = False
    for count in counts:
        use = Use(jobs=count, closed=closed)
        closed = over_mark(policy, use) is not None or (closed and agent_gate(policy, use).closed)
        if count >= high:
            assert closed
        if count <= high * 9 // 10:
            assert not closed
        refused = isinstance(
            decide(Asked(agent="a"), Standing(Book(agents={"a": policy}), agents={"a": use})), Admitted
        )
        assert refused != closed


def test_memory_of_an_agent_keeps_only_those_out_that_need_some():
    standing = Standing(Book(agents={"*": AgentPolicy(max_memory_mb=100)}), agents={"a": Use(memory_mb=101)})
    assert decide(Asked(agent="a"), standing).code == "agent_limit"
    assert isinstance(decide(Asked(agent="a", needs_memory=False), standing), Admitted)
    assert isinstance(decide(Asked(agent="b"), standing), Admitted)


# --- pauses ---


def test_a_paused_scope_refuses_or_keeps_what_belongs_to_it():
    for key in ("global", "pool:default", "agent:anonymous", "type:echo"):
        refused = decide(Asked(), Standing(book(pauses={key: PausePolicy(reason="upgrade")})))
        assert (
            refused.code == "paused" and "upgrade; submit again when it is resumed: `gpuorch queue" in refused.message
        )
        assert isinstance(decide(Asked(), Standing(book(pauses={key: PausePolicy(action="queue")}))), Admitted)
    other = Asked(lane="other", agent="other", type="other")
    assert isinstance(decide(other, Standing(book(pauses={"type:echo": PausePolicy()}))), Admitted)
    named = decide(Asked(lane="chat"), Standing(book(pauses={"pool:chat": PausePolicy()})))
    assert named.message.endswith(": `gpuorch queue resume --pool chat`")


# --- quiet ---


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ({"from": "09:00", "to": "17:00"}, ["05 09:00", "05 16:59"], ["05 08:59", "05 17:00"]),
        ({"from": "22:00", "to": "06:00"}, ["05 22:00", "05 00:00", "05 05:59"], ["05 06:00", "05 21:59"]),
        # Monday's night ends on Tuesday; Monday's early hours belong to Sunday.
        (
            {"days": ["mon"], "from": "22:00", "to": "06:00"},
            ["05 23:00", "06 05:00"],
            ["05 05:00", "06 23:00", "06 06:00"],
        ),
        ({"days": ["sat", "sun"], "from": "00:00", "to": "00:00"}, ["03 00:00", "04 23:59"], ["05 00:00"]),
    ],
)
def test_quiet_hours(hours, inside, outside):
    parsed = QuietHours.model_validate(hours)
    for day in inside:
        assert parsed.contains(datetime.fromisoformat(f"2026-01-{day}")), day
    for day in outside:
        assert not parsed.contains(datetime.fromisoformat(f"2026-01-{day}")), day


@given(st.lists(PERCENTAGES, max_size=60), st.integers(0, 5))
def test_load_is_quiet_after_its_time_and_never_by_not_knowing(loads, patience):
    policy = gates(
        capacity={"units": 1, "follow_load": True, "load_below_pct": 20, "load_for_seconds": patience}
    ).capacity
    state, run = None, 0
    for n, load in enumerate(loads):
        state = load_gate(policy, state, load, seconds(n))
        run = run + 1 if load is not None and load < 20 else 0
        assert state.closed == (run <= patience)
        assert quiet_now(policy, state, START).so == (not state.closed)


def test_it_is_not_quiet_when_nobody_said_when():
    for capacity in (None, gates(capacity={"units": 5}).capacity):
        assert not quiet_now(capacity, GateState(closed=False), START).so


# --- units ---


@given(st.lists(st.floats(0.1, 100), max_size=30), st.floats(1, 100))
def test_units_in_use_never_exceed_the_capacity_and_nobody_overtakes(costs, units):
    standing = Standing(book(capacity={"units": units}))
    used, stopped = 0.0, False
    for cost in costs:
        closed = go_on(Asked(cost_units=cost), standing, CAPACITY)
        standing.spoken_for |= closed is not None and closed.key == CAPACITY
        if closed is None:
            used += cost
            assert not stopped and used <= units + 1e-6
        elif closed.key == LARGE:
            assert cost > units
        else:
            stopped = True
    assert standing.used_units == pytest.approx(used)


def test_new_jobs_that_cost_or_want_quiet_wait_for_the_leader():
    standing = Standing(book(capacity={"units": 50, "quiet_units": 80}))
    assert decide(Asked(cost_units=80), standing).blocked_on == CAPACITY
    assert decide(Asked(cost_units=5, quiet=True), standing).blocked_on == QUIET
    assert decide(Asked(quiet=True), Standing(Book())).blocked_on == QUIET
    assert decide(Asked(quiet=True, later=True), standing) == Admitted()
    assert decide(Asked(cost_units=5), Standing(Book())) == Admitted()
    assert isinstance(decide(Asked(cost_units=81), standing), InvalidInput)


def test_who_leaves_a_gate_meets_those_behind_it_and_none_before():
    standing = Standing(book({"a": AgentPolicy(max_in_flight=1)}, capacity={"units": 5}), agents={"a": Use(jobs=9)})
    costly = Asked(agent="a", cost_units=6, quiet=True)
    assert go_on(costly, standing, f"{AGENT}a").key == f"{AGENT}a"
    assert go_on(costly, standing, MEMORY).key == QUIET
    standing.quiet = SO
    assert go_on(costly, standing, MEMORY).key == LARGE
    assert go_on(Asked(agent="a", cost_units=5, quiet=True), standing, QUIET) is None
    assert go_on(Asked(cost_units=1), standing, CAPACITY).key == CAPACITY


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"gpu_memory": {}}, "gpu_memory.over_pct"),
        ({"gpu_memory": {"over_pct": 101}}, "gpu_memory.over_pct"),
        ({"queue_depth": {}}, "queue_depth"),
        ({"queue_depth": {"max": 0}}, "queue_depth.max"),
        ({"queue_depth": {"max": 2_000_000}}, "queue_depth.max"),
        ({"queue_depth": {"lanes": {"a b": 1}}}, "queue_depth.lanes.a b.[key]"),
        ({"queue_depth": {"max": 1, "action": "drop"}}, "queue_depth.action"),
        ({"capacity": {"units": 101}}, "capacity.units"),
        ({"capacity": {"units": 1, "quiet": [{"from": "24:00", "to": "06:00"}]}}, "capacity.quiet.0.from"),
        ({"capacity": {"units": 1, "quiet": [{"from": "22:00"}]}}, "capacity.quiet.0.to"),
        (
            {"capacity": {"units": 1, "quiet": [{"days": ["monday"], "from": "1", "to": "2"}]}},
            "capacity.quiet.0.days.0",
        ),
        ({"gpu_memroy": {"over_pct": 90}}, "gpu_memroy"),
    ],
)
def test_a_wrong_policy_is_refused_by_field(document, field):
    with pytest.raises(InvalidInput) as refused:
        parse(Scope.ADMISSION, document)
    assert refused.value.field == field


def test_a_policy_is_written_as_it_was_read():
    document = {"capacity": {"units": 5.0, "quiet": [{"days": ["mon"], "from": "22:00", "to": "06:00"}]}}
    kept = parse(Scope.ADMISSION, document)
    assert parse(Scope.ADMISSION, kept.model_dump(exclude_unset=True)) == kept
    assert kept.model_dump(exclude_unset=True) == document
