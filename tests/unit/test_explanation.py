"""Why a job waits: one reason, the one that would stop it first."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import pytest

from orchestrator.explanation import Cap, Facts, Team, Why, as_document, explain
from orchestrator.placement import Ask, Cluster, GpuView, Reason, Refused
from orchestrator.pools import ASLEEP

ECHO = Team(frozenset({"echo"}), has_gpus=True, slots=4, busy=4)
FULL = GpuView("GPU-0", "n", 0, usable_mb=1000, leased_mb=900, foreign_mb=0)


def job(**fields):
    usual = {
        "job_id": "j",
        "status": "pending",
        "type": "echo",
        "lane": "default",
        "queued": "ready",
        "blocked_on": None,
        "wait_reason": None,
        "not_before": None,
        "attempt": 0,
        "attempts": 0,
        "max_attempts": 5,
        "error_kind": None,
        "last_error": None,
        "worker_id": None,
        "min_memory_mb": None,
        "cpu_fallback": False,
    }
    return usual | fields


def no_room(memory_mb: int = 500, gpu_count: int = 1, known: Sequence[GpuView] = (FULL,)) -> dict[str, Any]:
    ask = Ask(memory_mb, gpu_count, key="j")
    placement = Cluster([FULL]).place(ask)
    assert isinstance(placement, Refused)
    return {"ask": ask, "gpus": [FULL], "known": known, "placement": placement}


def facts(**given) -> Facts:
    return Facts(**({"job": job(), "teams": [ECHO]} | given))


#: In the order in which they would stop a job; each by itself is the reason.
OBSTACLES: dict[Why, dict[str, Any]] = {
    Why.POOL_CLOSED: {"pool_state": "draining"},
    Why.PAUSED: {"pauses": {"agent:a": "too loud"}},
    Why.NO_WORKER: {"teams": []},
    Why.TROUBLE: {"teams": [replace(ECHO, busy=0, trouble="cannot read jobs from Redis")]},
    Why.CAP_FULL: {"caps": [Cap("agent:a", 2, 2)]},
    Why.TOO_LARGE: no_room(1001),
    Why.NO_GPU: no_room(),
}


LARGE = [FULL._replace(gpu_uuid=f"GPU-{n}", node_id="big", gpu_index=n, usable_mb=8000, health="lost") for n in (1, 2)]


@pytest.mark.parametrize(
    ("memory_mb", "gpu_count", "words"),
    [
        (9000, 1, "needs 9000 MB, which fits no GPU that is known now: the largest can lease 8000 MB, on node big"),
        (9000, 2, "needs 9000 MB on each of 2 GPUs of one node, which fits no GPU that is known now: the largest"),
        (8000, 3, "needs 8000 MB on each of 3 GPUs of one node, and no node that is known now has so many: at most 2,"),
        (500, 4, "no node that is known now has so many: at most 3, on node big; ask for less, or add a node"),
        # What is ill, full or another's may be free one day.
        (8000, 1, None),
        (8000, 2, None),
    ],
)
def test_what_no_node_could_ever_hold_is_told_with_the_most_that_one_has(memory_mb, gpu_count, words):
    beside = FULL._replace(gpu_uuid="GPU-3", node_id="big", gpu_index=3)
    found = no_room(memory_mb, gpu_count, [FULL, *LARGE, beside])
    told = explain(facts(**found))
    assert told.reason is (Why.TOO_LARGE if words else Why.NO_GPU)
    assert (words or "needs") in told.message and told.position == 1 and told.starts_in_s is None
    deferred = explain(facts(**found, job=job(queued="delayed", wait_reason="?")))
    assert deferred.reason is told.reason


@pytest.mark.parametrize(
    ("teams", "why"),
    [([], Why.NO_WORKER), ([Team(frozenset({"other"}), has_gpus=True, slots=1, busy=0)], Why.NO_HANDLER)],
)
def test_what_was_deferred_is_told_what_will_not_pass_by_itself(teams, why):
    """A worker without the handler hands the job back for some seconds, again and again."""
    handed_back = job(queued="delayed", wait_reason="no handler for type 'echo' on worker w")
    assert explain(facts(teams=teams, job=handed_back, due_in_s=5.0)).reason is why
    unseen = {"ask": Ask(500, 1, key="j"), "placement": Refused(Reason.NO_GPU, "no GPU is known on the cluster")}
    assert explain(facts(teams=teams, job=handed_back, due_in_s=5.0, **unseen)).reason is why, "GPUs of nobody"
    failed = job(queued="delayed", attempts=1, max_attempts=3, error_kind="timeout")
    assert explain(facts(teams=teams, job=failed, due_in_s=5.0)).reason is Why.RETRY_PAUSE, "first things first"


@pytest.mark.parametrize("waits", [{}, {"queued": "delayed", "wait_reason": "needs 500 MB; no GPU is known on node n"}])
@pytest.mark.parametrize(
    ("known", "words"), [((), "no node has a GPU: "), ([FULL], "no node with a worker that could run it has a GPU: ")]
)
def test_where_no_worker_has_a_gpu_somebody_has_to_start_one_that_has(known, words, waits):
    told = explain(facts(teams=[replace(ECHO, has_gpus=False)], job=job(**waits), **no_room(known=known)))
    assert told.message == words + "start a worker where there is one, or submit with --cpu-fallback"
    assert (told.reason, told.lasts, told.position, told.starts_in_s) == (Why.NO_GPU_NODE, True, 1, None)
    mixed = [replace(ECHO, has_gpus=False), ECHO]
    assert explain(facts(teams=mixed, job=job(**waits), **no_room(known=known))).reason is Why.NO_GPU


def test_without_any_gpu_or_where_nodes_come_with_workers_nothing_is_too_large():
    assert explain(facts(**no_room(5000, known=()))).reason is Why.NO_GPU
    assert explain(facts(**no_room(5000), may_grow=True)).reason is Why.NO_GPU


@pytest.mark.parametrize("waits", [{}, {"queued": "announced"}, {"queued": "delayed", "wait_reason": "no slot"}])
def test_what_all_who_could_run_it_are_troubled_by_is_the_reason(waits):
    away = replace(ECHO, busy=0, idle=4, trouble="cannot read jobs from Redis")
    told = explain(facts(teams=[away], job=job(**waits)))
    assert told.message == "no worker that could run it is well: cannot read jobs from Redis"
    assert (told.reason, told.lasts, told.starts_in_s) == (Why.TROUBLE, True, None)
    assert explain(facts(teams=[away, ECHO], job=job(**waits))).reason is not Why.TROUBLE, "one is well"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, True),
        ({"ahead": 9}, True),
        ({"ahead": 1, "running_s": 3.0}, True),
        ({"ahead": 2, "running_s": 3.0}, False),
        ({"announced_s": 29.0}, False),
        ({"teams": [ECHO]}, False),
    ],
    ids=["alone", "nobody reads any", "room for both", "others run before it", "not for long", "no idle slot"],
)
def test_what_idle_slots_do_not_read_is_not_about_to_start(given, told):
    idle = {"teams": [replace(ECHO, busy=2, idle=2)], "announced_s": 31.0}
    answer = explain(facts(job=job(queued="announced"), **(idle | given)))
    assert (answer.reason, answer.lasts) == ((Why.UNREAD, True) if told else (Why.NEXT, False))
    if told:
        assert "announced 31 s ago and read by nobody" in answer.message and "redis-lost" in answer.message
        assert answer.starts_in_s is None and answer.position == given.get("ahead", 0) + 1


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("global", "gpuorch queue resume"),
        ("pool:gold", "gpuorch queue resume --pool gold"),
        ("type:echo", "gpuorch queue resume --type echo"),
        ("agent:a b:c", "gpuorch queue resume --agent 'a b:c'"),
    ],
)
def test_a_pause_is_told_with_the_command_that_ends_this_one(key, command):
    assert explain(facts(pauses={key: ""})).message == f"an operator paused {key}; `{command}`"


@pytest.mark.parametrize("why", OBSTACLES)
def test_a_single_obstacle_is_the_reason(why):
    assert explain(facts(**OBSTACLES[why])).reason is why


@pytest.mark.parametrize("why", OBSTACLES)
def test_it_is_told_whether_somebody_has_to_do_something(why):
    known = facts(**OBSTACLES[why])
    passes = why in {Why.CAP_FULL, Why.NO_GPU}
    assert as_document(known, explain(known), datetime.now(UTC))["lasts"] is not passes


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"queued": "blocked", "blocked_on": "quiet", "wait_reason": "until 22:00"},
        {"queued": "delayed"},
        {"queued": "delayed", "wait_reason": "no slot"},
        {"status": "running"},
        {"status": "done"},
    ],
)
def test_what_passes_by_itself_or_is_over_does_not_last(fields):
    assert not explain(facts(job=job(**fields))).lasts


@pytest.mark.parametrize(("first", "second"), list(combinations(OBSTACLES, 2)))
def test_of_two_obstacles_the_one_that_stops_it_first_is_told(first, second):
    assert explain(facts(**(OBSTACLES[second] | OBSTACLES[first]))).reason is first


def test_a_handler_that_nobody_has():
    answer = explain(facts(job=job(type="embed")))
    assert answer.reason is Why.NO_HANDLER and "'embed' (they have: echo)" in answer.message
    assert "gpuorch worker --pool default --handlers MODULE (with make run: ORCH_WORKER_HANDLERS=" in answer.message
    assert answer.lasts


@pytest.mark.parametrize(
    ("fields", "why", "words"),
    [
        ({"queued": "blocked", "blocked_on": "cap:host:a"}, Why.CAP_FULL, "1 of 1"),
        ({"queued": "blocked", "blocked_on": "quiet", "wait_reason": "until 22:00"}, Why.BLOCKED, "until 22:00"),
        ({"queued": "delayed"}, Why.NOT_BEFORE, "due in 7.0 s"),
        (
            {"queued": "delayed", "attempts": 2, "error_kind": "timeout"},
            Why.RETRY_PAUSE,
            "attempt 2 of 5 failed (timeout)",
        ),
        ({"queued": "delayed", "wait_reason": "no slot"}, Why.DEFERRED, "no slot; it is offered again in 7.0 s"),
    ],
)
def test_what_it_waits_for_outside_of_its_lane(fields, why, words):
    answer = explain(facts(job=job(**fields), due_in_s=7.0, caps=[Cap("host:a", 1, 1)]))
    assert answer.reason is why and words in answer.message


def test_a_moment_that_is_far_is_told_by_the_clock():
    later = job(queued="delayed", not_before=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert explain(facts(job=later, due_in_s=7200.0)).message.endswith("it is due at 2030-01-02 03:04:05 UTC")


def test_a_gate_is_told_as_the_leader_saw_it_last():
    waiting = job(queued="blocked", blocked_on="quiet", wait_reason="waits until it is quiet")
    answer = explain(facts(job=waiting, gate="GPUs are 80 % busy"))
    assert answer.message == "waits until it is quiet; by now: GPUs are 80 % busy"


def test_a_job_put_off_for_memory_is_told_of_the_memory_of_now():
    waiting = job(queued="delayed", wait_reason="needs 500 MB", min_memory_mb=500)
    assert explain(facts(job=waiting, due_in_s=1.0, **no_room())).reason is Why.NO_GPU
    assert explain(facts(job=waiting, due_in_s=1.0)).reason is Why.DEFERRED


@pytest.mark.parametrize("relief", [{"job": job(cpu_fallback=True)}, {"warm_slots": 1}])
def test_who_can_do_without_free_memory_is_not_told_of_it(relief):
    assert explain(facts(**(no_room() | relief))).reason is Why.IN_LINE


def test_its_place_and_when_its_turn_comes():
    answer = explain(facts(ahead=8, run_s=3.0))
    assert (answer.reason, answer.position, answer.starts_in_s) == (Why.IN_LINE, 9, 6.75)
    assert "0 of 4 slots are free" in answer.message
    assert explain(facts(ahead=8)).starts_in_s is None
    assert explain(facts(ahead=8, ahead_at_least=True)).message.startswith("at least 8")
    announced = explain(facts(job=job(queued="announced"), run_s=3.0))
    assert (announced.reason, announced.position, announced.starts_in_s) == (Why.NEXT, 1, 0.75)


def test_the_first_in_line_starts_now_only_where_a_slot_is_free():
    idle = replace(ECHO, busy=3)
    assert explain(facts(teams=[idle])).starts_in_s == 0.0
    assert explain(facts(teams=[idle], ahead=8, run_s=3.0)).starts_in_s == 6.0
    assert explain(facts()).starts_in_s is None


def test_what_runs_for_longer_than_the_last_ones_did_is_no_moment_from_its_end():
    assert explain(facts(run_s=0.01, running_s=40.0)).starts_in_s == 10.0
    assert explain(facts(run_s=60.0, running_s=40.0)).starts_in_s == 15.0
    assert explain(facts(running_s=40.0)).starts_in_s == 10.0


def test_the_next_under_a_full_cap_starts_when_one_of_those_ends():
    idle = {"teams": [replace(ECHO, busy=2)], **OBSTACLES[Why.CAP_FULL]}
    assert explain(facts(**idle, run_s=0.01, running_s=40.0)).starts_in_s == 20.0
    assert explain(facts(**idle, ahead=5, run_s=40.0)).starts_in_s == 120.0
    assert explain(facts(**idle)).starts_in_s is None


def test_a_pool_at_zero_is_no_reason_to_do_anything():
    asleep = explain(facts(teams=[], pool_reason=ASLEEP))
    assert (asleep.reason, asleep.lasts, asleep.position) == (Why.POOL_ASLEEP, False, 1)
    assert "started now" in asleep.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"pool_reason": "no node has a handler for type 'x'", "drained": ["n"]},
            ": no node has a handler for type 'x'",
        ),
        ({"drained": ["n1"]}, "; drained: n1 (gpuorch nodes resume n1)"),
        ({"drained": ["n1", "n2"]}, "; drained: n1, n2 (gpuorch nodes resume NODE)"),
        ({}, "; start one: gpuorch worker --pool default; if one runs"),
        (
            {"job": job(lane="chat")},
            ", or let those that serve any have it: gpuorch pools create chat --type echo; if one runs",
        ),
    ],
)
def test_where_nobody_serves_it_is_told_what_is_known_of_that(given, words):
    assert words in explain(facts(teams=[], **given)).message


@pytest.mark.parametrize("why", [Why.POOL_CLOSED, Why.PAUSED, Why.NO_WORKER, Why.NO_GPU])
def test_nobody_guesses_when_an_obstacle_goes_away(why):
    assert explain(facts(run_s=1.0, **OBSTACLES[why])).starts_in_s is None


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in run\n    boom()\nValueError: boom\n'


@pytest.mark.parametrize(
    ("fields", "why", "words"),
    [
        ({"status": "running", "attempt": 3, "worker_id": "w"}, Why.RUNNING, "attempt 3 on worker w"),
        ({"status": "running", "worker_id": "w", "cancel_requested_at": "now"}, Why.STOPPING, "cancelled"),
        ({"status": "failed", "last_error": "boom"}, Why.ENDED, "failed: boom"),
        ({"status": "dead_letter", "last_error": TRACE}, Why.ENDED, "it ended as dead_letter: ValueError: boom"),
        ({"status": "done"}, Why.ENDED, "it ended as done"),
    ],
)
def test_a_job_that_does_not_wait(fields, why, words):
    answer = explain(Facts(job(**fields)))
    assert answer.reason is why and words in answer.message


def test_the_document_has_the_evidence():
    known = facts(caps=[Cap("agent:a", 2, 2)], **no_room())
    evidence = as_document(known, explain(known), datetime.now(UTC))["evidence"]
    assert evidence["caps"] == [{"key": "agent:a", "in_use": 2, "max": 2}]
    assert evidence["gpus"] == [
        {"gpu_uuid": "GPU-0", "node_id": "n", "free_mb": 100, "usable_mb": 1000, "against": "no_memory"}
    ]
    assert evidence["workers"] == [{"types": ["echo"], "has_gpus": True, "slots": 4, "busy": 4}]
