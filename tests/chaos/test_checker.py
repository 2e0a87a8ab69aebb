"""The checker itself: a sound history passes, and every way to break it is found."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.chaos.checker import check
from tests.chaos.history import History
from tests.chaos.kinds import Submitted
from tests.chaos.ledger import Line

#: The database's time of second 0 of a history.
EPOCH = datetime(2030, 1, 1)  # noqa: DTZ001 - as the driver returns it
OFFSET = EPOCH.replace(tzinfo=UTC).timestamp()


def event(name: str, at: float, job_id: str | None = "job", attempt: int | None = None, **given: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"event_type": name, "job_id": job_id, "attempt": attempt, "worker_id": None, "details": {}}
    return made | {"ts": EPOCH + timedelta(seconds=at)} | given


def row(**given: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "status": "done",
        "queued": None,
        "attempt": 2,
        "attempts": 2,
        "max_attempts": 5,
        "crashes": 1,
    }
    return made | given


def sound() -> History:
    """A job whose first worker was lost in the middle, and which its second attempt did."""
    return History(
        submitted={"job": Submitted("job", "quick", frozenset({"done"}), not_before=OFFSET + 0.5)},
        jobs={"job": row()},
        audit=[
            event("leader.elected", 0, None, details={"epoch": 1}),
            event("job.submitted", 0),
            event("job.claimed", 1, attempt=1, worker_id="w1"),
            event("worker.lost", 5, None, worker_id="w1"),
            event("job.retry", 5, attempt=1),
            event("leader.elected", 5, None, details={"epoch": 2}),
            event("job.claimed", 6, attempt=2, worker_id="w2"),
            event("job.done", 8, attempt=2),
        ],
        results={"job": {"attempt": 2, "result": {"attempt": 2, "nonce": "b"}}},
        lines=[
            Line("job", 1, "start", 11, 1.1),
            Line("job", 2, "start", 22, 6.1),
            Line("job", 1, "done", 11, 7.0, "a"),  # nobody told its process that it was lost
            Line("job", 2, "done", 22, 7.5, "b"),
        ],
        gpus=[{"gpu_uuid": "gpu", "leased_mb": 0}],
        streams={"lane": (0, 0)},
        wall_offset=OFFSET,
    )


def test_a_sound_history_passes():
    assert check(sound()) == []


def without(history: History, name: str) -> list[dict[str, Any]]:
    return [item for item in history.audit if item["event_type"] != name]


def with_row(**given: Any) -> dict[str, Any]:
    return {"jobs": {"job": row(**given)}}


def plus_events(*events: dict[str, Any]) -> dict[str, Any]:
    return {"audit": [*sound().audit, *events]}


def plus_lines(*lines: Line) -> dict[str, Any]:
    return {"lines": [*sound().lines, *lines]}


HOPELESS = {"job": Submitted("job", "hopeless", frozenset({"dead_letter"}))}
BURIED = {
    **with_row(status="dead_letter", crashes=2),
    "submitted": HOPELESS,
    "results": {},
    "audit": [*without(sound(), "job.done"), event("job.dead_letter", 8, attempt=2)],
}

BROKEN = {
    "an accepted job without a row": ("INV-1", {"jobs": {}}),
    "a job that never ended": ("INV-1", with_row(status="running")),
    "a job that waits for ever": ("INV-1", with_row(status="pending", queued="announced")),
    "a wrong end": ("INV-1", with_row(status="failed")),
    "a dead letter with attempts left": ("INV-1", with_row(status="dead_letter")),
    "done twice": ("INV-2", plus_events(event("job.done", 9, attempt=2))),
    "a second end of another kind": ("INV-2", plus_events(event("job.failed", 9, attempt=1))),
    "done without an audit row": ("INV-2", {"audit": without(sound(), "job.done")}),
    "done by an attempt that was retried": (
        "INV-2",
        {"audit": [*without(sound(), "job.done"), event("job.done", 8, attempt=1)]},
    ),
    "an attempt that never ended": ("INV-2", {"audit": without(sound(), "job.retry")}),
    "an attempt that was retried twice": ("INV-2", plus_events(event("job.retry", 9, attempt=1))),
    "an attempt claimed twice": ("INV-3", plus_events(event("job.claimed", 9, attempt=2))),
    "an attempt left out": ("INV-3", plus_events(event("job.claimed", 9, attempt=4))),
    "a row behind its audit": ("INV-3", with_row(attempt=1)),
    "a start without a claim": ("INV-3", plus_lines(Line("job", 3, "start", 33, 9.0))),
    "an attempt that started twice": ("INV-3", plus_lines(Line("job", 2, "start", 33, 6.5))),
    "a start before its claim": ("INV-3", {"lines": [Line("job", 2, "start", 22, 5.0), *sound().lines[2:]]}),
    "a result of another attempt": ("INV-2", {"results": {"job": {"attempt": 1, "result": {"nonce": "a"}}}}),
    "a result that no handler returned": ("INV-2", {"results": {"job": {"attempt": 2, "result": {"nonce": "x"}}}}),
    "no result": ("INV-2", {"results": {}}),
    "a result of a job that is not done": ("INV-2", BURIED | {"results": sound().results}),
    "too many attempts": ("INV-6", with_row(max_attempts=1)),
    "too many crashes": ("INV-6", with_row(crashes=3)),
    "two attempts at once without a lost worker": ("INV-13", {"audit": without(sound(), "worker.lost")}),
    "a cancel that was granted and not done": ("INV-11", {"cancel_granted": {"job"}}),
    "cancelled by nobody": ("INV-1", with_row(status="cancelled")),
    "a start after the end": ("INV-11", plus_lines(Line("job", 2, "start", 33, 9.0))),
    "a handler that runs on after the end": ("INV-11", plus_lines(Line("job", 2, "raised", 22, 9.0))),
    "a start before its time": (
        "INV-9",
        {"submitted": {"job": replace(sound().submitted["job"], not_before=OFFSET + 3)}},
    ),
    "memory that stays leased": ("INV-17", {"gpus": [{"gpu_uuid": "gpu", "leased_mb": 1}]}),
    "a lease that stays": ("INV-17", {"leases": [{"job_id": "job", "memory_mb": 1}]}),
    "a seat that stays taken": ("INV-25", {"caps": [{"cap_key": "agent:a", "in_use": 1}]}),
    "an entry that stays": ("INV-4", {"streams": {"lane": (1, 0)}}),
    "a pending entry that stays": ("INV-4", {"streams": {"lane": (0, 1)}}),
    "an epoch that came twice": ("INV-18", plus_events(event("leader.elected", 9, None, details={"epoch": 2}))),
    "a letter about a living job": ("INV-6", {"letters": [{"job_id": "job", "reason": "unknown_job"}]}),
    "a dead letter that the table lacks": ("INV-6", BURIED | {"dead_letters": []}),
    "a dead letter that stands twice": ("INV-6", BURIED | {"dead_letters": [{"job_id": "job"}] * 2}),
    "a row among the dead that is alive": ("INV-6", {"dead_letters": [{"job_id": "job"}]}),
    "what was seen during the run": ("INV-12", {"incidents": [("INV-12", None, "too much leased")]}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_found(name):
    invariant, changes = BROKEN[name]
    assert invariant in {violation.invariant for violation in check(replace(sound(), **changes))}


def test_a_dead_letter_after_too_many_crashes_is_sound():
    assert check(replace(sound(), **BURIED | {"dead_letters": [{"job_id": "job"}]})) == []


CANCELLED: dict[str, Any] = {
    "submitted": {"job": replace(sound().submitted["job"], ends=frozenset({"done"}))},
    "cancel_asked": {"job"},
    "cancel_granted": {"job"},
    "results": {},
}


def test_a_job_cancelled_while_it_ran_is_sound():
    audit = [*without(sound(), "job.done"), event("job.cancelled", 8, attempt=2)]
    assert check(replace(sound(), **CANCELLED, **with_row(status="cancelled"), audit=audit)) == []


def test_a_job_cancelled_between_two_attempts_is_sound():
    audit = [*sound().audit[:5], event("job.cancelled", 8, attempt=1)]
    waiting = with_row(status="cancelled", attempt=1, attempts=1)
    lines = [line for line in sound().lines if line.attempt == 1]
    assert check(replace(sound(), **CANCELLED, **waiting, audit=audit, lines=lines)) == []


def test_the_history_of_a_job_shows_all_that_is_known():
    told = sound().of("job")
    assert all(word in told for word in ("submitted", "status=done", "job.retry", "nonce", "start"))
