"""What a job is: its states, its body, its fingerprint, and what follows a failure."""

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import jobs
from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.jobs import (
    ARROWS,
    OWNED,
    TERMINAL,
    ErrorKind,
    JobSpec,
    NewJob,
    RetryPolicy,
    Status,
    after_failure,
    backoff,
    new_job_id,
)
from orchestrator.jsontext import canonical_json
from orchestrator.setting_values import RetryRule
from orchestrator.settings import Settings

POLICY = RetryPolicy(base_s=1.0, cap_s=30.0, max_crashes=2)


def prepare(max_bytes=1 << 20, **fields):
    return NewJob.prepare({"type": "echo", "payload": {}} | fields, max_bytes, 64)


# --- states ---


def test_only_an_operator_leads_out_of_an_ending():
    leaving = [arrow for arrow in ARROWS if not arrow.source.isdisjoint(TERMINAL)]
    assert leaving == [jobs.REDRIVE, jobs.RERUN]
    assert jobs.REDRIVE.source == TERMINAL - {Status.DONE, Status.SKIPPED}
    assert jobs.RERUN.source == {Status.DONE, Status.SKIPPED}


def test_every_state_is_reached_and_left_a_good_end_only_to_run_again():
    assert {arrow.target for arrow in ARROWS} == set(Status)
    assert {state for arrow in ARROWS for state in arrow.source} == set(Status)
    assert {arrow.event for arrow in ARROWS if arrow.source & {Status.DONE, Status.SKIPPED}} == {"job.rerun"}


def test_an_attempt_may_end_from_both_owned_states():
    for arrow in (jobs.FINISH, jobs.SKIP, jobs.FAIL, jobs.BURY, jobs.RETRY, jobs.HAND_BACK, jobs.STOP):
        assert arrow.source == OWNED


def test_events_are_unique_names():
    """A cancelled job is cancelled, whether it waited or ran: that is one event."""
    events = [arrow.event for arrow in ARROWS if arrow not in {jobs.DEFER, jobs.CANCEL}]
    assert len(set(events)) == len(events)
    assert jobs.CANCEL.event == jobs.STOP.event
    assert all(event and event.startswith("job.") for event in events)
    assert jobs.DEFER.event is None and jobs.DEFER.source == {jobs.DEFER.target}


# --- the body ---

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({"type": None}, "type"),
    "empty type": ({"type": ""}, "type"),
    "type with a newline": ({"type": "echo\n"}, "type"),
    "type too long": ({"type": "x" * 65}, "type"),
    "payload is a list": ({"payload": []}, "payload"),
    "payload is null": ({"payload": None}, "payload"),
    "empty id": ({"job_id": ""}, "job_id"),
    "id with a slash": ({"job_id": "a/b"}, "job_id"),
    "id with braces": ({"job_id": "{a}"}, "job_id"),
    "id with a space": ({"job_id": "a b"}, "job_id"),
    "id with NUL": ({"job_id": "a\0"}, "job_id"),
    "id too long": ({"job_id": "x" * 129}, "job_id"),
    "id is a number": ({"job_id": 7}, "job_id"),
    "id in other letters": ({"job_id": "jоb"}, "job_id"),
    "pool with braces": ({"pool_id": "{x}"}, "pool_id"),
    "agent empty": ({"agent": ""}, "agent"),
    "priority out of range": ({"priority": 101}, "priority"),
    "priority unknown": ({"priority": "URGENT"}, "priority"),
    "priority as a fraction": ({"priority": 1.5}, "priority"),
    "priority as a truth": ({"priority": True}, "priority"),
    "memory negative": ({"min_memory_mb": -1}, "min_memory_mb"),
    "memory as text": ({"min_memory_mb": "5"}, "min_memory_mb"),
    "memory beyond the column": ({"min_memory_mb": 2**31}, "min_memory_mb"),
    "no gpu": ({"gpu_count": 0}, "gpu_count"),
    "fallback as text": ({"cpu_fallback": "yes"}, "cpu_fallback"),
    "runtime zero": ({"max_runtime_sec": 0}, "max_runtime_sec"),
    "runtime not a number": ({"max_runtime_sec": math.nan}, "max_runtime_sec"),
    "runtime for ever": ({"max_runtime_sec": math.inf}, "max_runtime_sec"),
    "attempts zero": ({"max_attempts": 0}, "max_attempts"),
    "start without a zone": ({"earliest_start_at": "2030-01-01T00:00:00"}, "earliest_start_at"),
    "start as nonsense": ({"earliest_start_at": "tomorrow"}, "earliest_start_at"),
    "tags as text": ({"tags": "a"}, "tags"),
    "an empty tag": ({"tags": [""]}, "tags.0"),
    "too many tags": ({"tags": ["t"] * 33}, "tags"),
    "an unknown field": ({"entrypoint": "os:system"}, "entrypoint"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_body_is_refused_and_the_field_named(case):
    fields, field = WRONG[case]
    with pytest.raises(InvalidInput) as refused:
        prepare(**fields)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize("body", [None, [], "x", 7, {}, {"type": "echo"}, {"payload": {}}])
def test_a_body_that_is_no_job_is_refused(body):
    with pytest.raises(InvalidInput):
        JobSpec.parse(body)


def test_an_unknown_field_of_any_length_is_quoted_briefly():
    with pytest.raises(InvalidInput) as refused:
        prepare(**{"x" * 10_000: 1})
    assert len(str(refused.value)) < 200


def test_named_priorities_are_numbers():
    assert [prepare(priority=name).spec.priority for name in ("LOW", "NORMAL", "HIGH", 7)] == [-50, 0, 50, 7]


def test_an_id_is_generated_when_absent_and_sorts_by_time(monkeypatch):
    assert prepare().generated_id
    assert not prepare(job_id="mine").generated_id
    moments = iter([1_000, 2_000_000_000, 1_700_000_000_000_000_000, 1_700_000_001_000_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(moments))
    ids = [new_job_id() for _ in range(4)]
    assert ids == sorted(ids)
    assert prepare(job_id=ids[0]).job_id == ids[0]  # what we generate is valid ourselves


def test_a_start_in_another_zone_is_the_same_moment():
    here = prepare(earliest_start_at="2030-01-01T02:00:00+02:00").not_before
    assert here == prepare(earliest_start_at="2030-01-01T00:00:00Z").not_before
    assert here is not None
    assert here.tzinfo is None


# --- canonical content ---


def deep(levels, leaf=None):
    value = [] if leaf is None else leaf
    for _ in range(levels - 1):
        value = [value]
    return value


def test_depth_is_limited_without_recursion():
    """A payload is a level itself: 63 more fit into 64."""
    assert prepare(payload={"v": deep(63)}).payload
    for levels in (64, 65, 100_000):
        with pytest.raises(InvalidInput, match="deeper than 64"):
            prepare(payload={"v": deep(levels)})


@pytest.mark.parametrize("value", [101, -101, 10**400, "URGENT", "7", 1.5, True, None, []])
def test_a_priority_is_told_in_whole(value):
    with pytest.raises(InvalidInput) as refused:
        prepare(priority=value)
    assert refused.value.message == "priority: must be LOW, NORMAL, HIGH or a whole number of -100…100"


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, json.loads("1e400"), "\ud800", {"\udfff": 1}, b"x", {1, 2}, object()],
    ids=repr,
)
def test_what_is_not_json_is_refused(value):
    with pytest.raises(InvalidInput, match="not plain JSON"):
        prepare(payload={"v": value})


def test_the_limit_counts_bytes_of_the_stored_form():
    text = '{"k":"éé"}'
    assert prepare(max_bytes=len(text.encode()), payload={"k": "éé"}).payload == text
    with pytest.raises(PayloadTooLarge):
        prepare(max_bytes=len(text.encode()) - 1, payload={"k": "éé"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def shuffled(value):
    """The same content with every object's keys in the other order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_text_of_a_payload_does_not_depend_on_the_order_of_keys(payload):
    try:
        text = canonical_json(payload, "payload", 64)
    except InvalidInput:
        return  # a lone surrogate
    assert text == canonical_json(shuffled(payload), "payload", 64)
    assert json.loads(text) == payload


def test_equal_content_has_equal_fingerprints():
    base = prepare(payload={"a": 1, "b": [2]}).content_hash
    assert prepare(payload={"b": [2], "a": 1}).content_hash == base
    defaults = {
        "agent": "anonymous",
        "pool_id": "default",
        "priority": "NORMAL",
        "gpu_count": 1,
        "cpu_fallback": False,
        "model_id": None,
        "min_memory_mb": None,
        "max_attempts": None,
        "tags": [],
        "job_id": "another",
    }
    for key, value in defaults.items():
        assert prepare(payload={"a": 1, "b": [2]}, **{key: value}).content_hash == base, key
    assert prepare(payload={"a": 1, "b": [2]}, pool_id=None).content_hash == base


def test_other_content_has_another_fingerprint():
    variants: list[dict[str, Any]] = [
        {},
        {"payload": {"a": 2}},
        {"payload": {"a": "1"}},
        {"payload": {"a": True}},
        {"type": "other"},
        {"agent": "me"},
        {"priority": 1},
        {"max_attempts": 3},
        {"tags": ["x"]},
        {"min_memory_mb": 0},
        {"deadline_at": "2999-01-01T00:00:00Z"},
        {"earliest_start_at": "2999-01-01T00:00:00Z"},
        {"retry_base_sec": 1},
        {"retry_cap_sec": 1},
    ]
    hashes = {prepare(**({"payload": {"a": 1}} | variant)).content_hash for variant in variants}
    assert len(hashes) == len(variants)


# --- after a failure ---

NEXT = [
    # kind, attempts, crashes → arrow
    (ErrorKind.TRANSIENT, 1, 0, jobs.RETRY),
    (ErrorKind.TRANSIENT, 4, 9, jobs.RETRY),
    (ErrorKind.TRANSIENT, 5, 0, jobs.BURY),
    (ErrorKind.TIMEOUT, 1, 0, jobs.RETRY),
    (ErrorKind.TIMEOUT, 6, 0, jobs.BURY),
    (ErrorKind.WORKER_LOST, 1, 1, jobs.RETRY),
    (ErrorKind.WORKER_LOST, 1, 2, jobs.BURY),
    (ErrorKind.WORKER_LOST, 5, 1, jobs.BURY),
    (ErrorKind.PERMANENT, 1, 0, jobs.FAIL),
    (ErrorKind.PERMANENT, 5, 2, jobs.FAIL),
    (ErrorKind.BAD_RESULT, 1, 0, jobs.FAIL),
]


@pytest.mark.parametrize(("kind", "attempts", "crashes", "arrow"), NEXT)
def test_what_follows_a_failure(kind, attempts, crashes, arrow):
    step = after_failure(kind, attempts=attempts, max_attempts=5, crashes=crashes, policy=POLICY)
    assert step.arrow is arrow
    assert step.delay_s == 0 or arrow is jobs.RETRY


def test_a_lost_worker_costs_no_wait_and_a_handlers_wish_is_kept():
    lost = after_failure(ErrorKind.WORKER_LOST, attempts=1, max_attempts=5, crashes=1, policy=POLICY)
    wish = after_failure(ErrorKind.TRANSIENT, attempts=1, max_attempts=5, crashes=0, policy=POLICY, retry_after_s=123.0)
    assert (lost.delay_s, wish.delay_s) == (0, 123.0)


@given(
    st.sampled_from(ErrorKind),
    st.integers(1, 200),
    st.integers(1, 100),
    st.integers(0, 200),
    st.integers(1, 100),
)
def test_no_job_is_tried_more_often_than_it_may(kind, attempts, max_attempts, crashes, max_crashes):
    policy = RetryPolicy(1.0, 30.0, max_crashes)
    step = after_failure(kind, attempts=attempts, max_attempts=max_attempts, crashes=crashes, policy=policy)
    if step.arrow is jobs.RETRY:
        assert attempts < max_attempts
        assert 0 <= step.delay_s <= policy.cap_s
        assert kind is not ErrorKind.WORKER_LOST or crashes < max_crashes


@given(st.integers(-5, 10_000), st.floats(0.001, 100), st.floats(0.001, 10_000), st.floats(0, 1))
def test_backoff_stays_within_its_bounds(attempts, base, cap, spin):
    policy = RetryPolicy(base, cap, 2)
    wait = backoff(attempts, policy, spin)
    assert 0 <= wait <= cap
    assert wait <= base * 2.0 ** max(attempts - 1, 0) if attempts < 1000 else True
    assert backoff(attempts + 1, policy, spin) >= wait


def test_backoff_doubles_up_to_its_cap_and_is_jittered():
    assert [backoff(n, POLICY, 1.0) for n in (1, 2, 3, 6, 7, 5000)] == [1, 2, 4, 30, 30, 30]
    assert len({backoff(5, POLICY) for _ in range(20)}) > 10


# --- deadlines ---


def test_a_deadline_in_another_zone_is_the_same_moment():
    utc, zoned = (prepare(deadline_at=text) for text in ("2999-01-01T12:00:00Z", "2999-01-01T13:00:00+01:00"))
    assert utc.deadline == zoned.deadline and utc.content_hash == zoned.content_hash


@pytest.mark.parametrize("text", [1, "4102444800", "soon", "2999-01-01T12:00:00", "0001-01-01T00:00:00+14:00", True])
def test_what_is_no_moment_is_no_deadline(text):
    """BI-7."""
    with pytest.raises(InvalidInput) as refused:
        prepare(deadline_at=text)
    assert refused.value.field == "deadline_at"


def test_a_deadline_before_the_start_is_refused():
    with pytest.raises(InvalidInput, match="could never run"):
        prepare(earliest_start_at="2999-01-01T00:00:00Z", deadline_at="2999-01-01T00:00:00Z")


# --- policies ---

BY_TYPE = RetryPolicy(
    base_s=1.0,
    cap_s=30.0,
    max_crashes=2,
    by_type={
        "embed": RetryRule(max_attempts=2, base_s=4.0, cap_s=8.0),
        "slow": RetryRule(base_s=100.0),
        "eager": RetryRule(cap_s=3.0),
    },
)


@pytest.mark.parametrize(
    ("asked", "base_s", "cap_s", "attempts"),
    [
        (("other", None, None), 1.0, 30.0, 5),
        (("other", 2.0, None), 2.0, 30.0, 5),
        (("other", 90.0, None), 90.0, 90.0, 5),  # who asks for a longer first wait means it
        (("other", None, 7.0), 1.0, 7.0, 5),
        (("embed", None, None), 4.0, 8.0, 2),
        (("embed", 6.0, 60.0), 6.0, 60.0, 2),
        (("embed", 20.0, None), 20.0, 20.0, 2),  # the job's word counts more than its type's
        (("slow", None, None), 100.0, 100.0, 5),
        (("slow", None, 5.0), 100.0, 5.0, 5),
        (("eager", None, None), 1.0, 3.0, 5),
    ],
)
def test_a_job_beats_its_type_and_its_type_beats_the_rest(asked, base_s, cap_s, attempts):
    policy = BY_TYPE.for_job(*asked)
    assert (policy.base_s, policy.cap_s, policy.max_attempts, policy.max_crashes) == (base_s, cap_s, attempts, 2)


def test_a_job_like_all_others_costs_no_new_policy():
    assert BY_TYPE.for_job("other") is BY_TYPE


def test_the_policy_is_that_of_the_settings():
    chosen = Settings(
        retry_base_s=2.0, retry_cap_s=9.0, max_crashes=4, job_retry_max=7, retry_by_type={"a": RetryRule()}
    )
    assert RetryPolicy.of(chosen) == RetryPolicy(2.0, 9.0, 4, 7, {"a": RetryRule()})
