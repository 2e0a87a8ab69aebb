"""Batches without a server: who waits for whom, what a slot is told, and what becomes of each job."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from selectors import EVENT_READ
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import worker.intake
from orchestrator import batch_sizes
from orchestrator.batch_sizes import Sizes
from orchestrator.batching import Seats
from orchestrator.jobs import ErrorKind
from orchestrator.leases import Remains
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.settle import Outcome
from orchestrator.stream.lane import Entry
from worker import Cancelled, Permanent, Retry, Skip, answers, handler
from worker.flags import Flags
from worker.handlers import Batching
from worker.intake import Intake
from worker.lifeline import Lifeline
from worker.parts import Parts
from worker.process import SlotProcess
from worker.run import Run
from worker.slots import SlotEvents, SlotPool
from worker.wire import Channel

# --- waiting for company ---


class Lane:
    """A reader of entries that arrive one after the other, each while somebody waits for it."""

    def __init__(self, *arriving: str, on_wait: Callable[[], object] = lambda: None) -> None:
        self.arriving = list(arriving)
        self.on_wait = on_wait
        self.limits_ms: list[int] = []
        self.here: list[str] = []
        self.waits = 0

    def wait_for_more(self, block_ms: int) -> None:
        self.waits += 1
        self.limits_ms.append(block_ms)
        self.on_wait()
        self.here += self.arriving[:1]
        self.arriving = self.arriving[1:]

    def read_fitting(self, seats: Seats) -> list[Entry]:
        taken: list[str] = []
        while self.here and (seats.places.get(self.here[0], 0) > len(taken) or seats.slots):
            taken.append(self.here.pop(0))
        seats.blocked = bool(self.here)
        return [Entry("1-1", "job", type) for type in taken]


BATCHING = Batching({"many": 4}, {"many": 60.0})


def intake_of(lane: Lane, pending: tuple[str, ...] = ()) -> Intake:
    """One that only reads; `pending` are entries that it got already, before a fault."""
    nothing: Any = SimpleNamespace(db_timeout_s=1.0, redis_block_ms=1)
    slots: Any = SimpleNamespace(batching=BATCHING, seal=lambda: None)
    told: dict[str, Any] = dict.fromkeys(("vouched", "no_room", "on_read", "on_refused", "on_broken", "on_denied"))
    made = Intake(nothing, nothing, nothing, lane, slots, nothing, nothing, nothing, **told)  # type: ignore[arg-type]
    made._unanswered = [Entry("0-1", "job", type) for type in pending]
    return made


def company(lane: Lane, slots: int, first: str = "many", stopped: bool = False) -> str:
    intake = intake_of(lane)
    if stopped:
        intake.stop()
    seats = Seats(slots, BATCHING.sizes)
    seats.take(first)
    return " ".join(entry.type for entry in intake._company([Entry("1-0", "job", first)], seats))


def test_a_batch_that_is_full_waits_no_longer():
    lane = Lane("many", "many", "many", "many")
    assert company(lane, slots=1) == "many many many"
    assert lane.waits == 3


def test_the_time_counts_from_the_first(monkeypatch):
    clock = itertools.count()
    lane = Lane("many", "many", on_wait=lambda: [next(clock) for _ in range(24)])
    monkeypatch.setattr(worker.intake, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    assert company(lane, slots=1) == "many many"
    assert lane.limits_ms == [60_000, 35_000, 10_000]


def test_whoever_runs_by_itself_is_not_kept_waiting():
    lane = Lane("many", "plain", "many")
    assert company(lane, slots=2) == "many plain"
    assert company(Lane("many"), slots=2, first="plain") == ""


def test_nobody_waits_behind_what_fits_nowhere():
    lane = Lane("many", "plain", "many")
    assert company(lane, slots=1) == "many"
    assert lane.waits == 2


def test_nothing_is_read_while_nobody_vouches_for_the_worker(monkeypatch):
    """It may be declared dead by now, and what it claimed would be another's."""
    monkeypatch.setattr(worker.intake, "UNVOUCHED_PAUSE_S", 0.0)
    lane = Lane("many")
    intake = intake_of(lane, ("many",))
    intake._vouched = lambda: False
    intake._slots = Mock(wait_room=Mock(side_effect=AssertionError("asked for a free slot")))
    intake._step()
    assert len(intake._unanswered) == 1


def test_a_worker_that_stops_waits_for_nobody():
    lane = Lane("many")
    assert (company(lane, slots=1, stopped=True), lane.waits) == ("", 0)


def test_what_was_read_before_a_fault_is_not_forgotten_over_what_comes():
    lane = Lane("many")
    intake = intake_of(lane, ("many", "plain", "many"))
    assert [entry.type for entry in intake._take(Seats(1, BATCHING.sizes))] == ["many"]
    assert [entry.type for entry in intake._unanswered] == ["plain", "many"]
    assert lane.waits == 0


def test_what_was_put_back_is_announced_at_once():
    nudged: list[str] = []
    parts: Any = SimpleNamespace(_publisher=SimpleNamespace(nudge=nudged.append), lane=SimpleNamespace(name="default"))
    Parts._denied(parts, [NotClaimed("no handler")])
    assert nudged == []
    Parts._denied(parts, [NotClaimed("no slot", put_back=True)])
    assert nudged == ["default"]


def test_a_lane_is_refilled_when_it_was_emptied_and_only_looked_at_while_it_is_empty():
    nudged, idle = list[str](), list[str]()
    parts: Any = SimpleNamespace(
        _publisher=SimpleNamespace(nudge=nudged.append, idle=idle.append), lane=SimpleNamespace(name="default")
    )
    Parts._read(parts, 0, True)
    assert (nudged, idle) == ([], ["default"])
    Parts._read(parts, 2, True)
    assert (nudged, idle) == (["default"], ["default"])


# --- what handlers say ---


@pytest.mark.parametrize("given", [{"batch": 0}, {"batch": 1001}, {"batch": 2, "batch_wait_ms": -1}])
def test_batches_have_bounds(given):
    with pytest.raises(ValueError, match="batch"):
        handler("never", **given)


def told(value, size):
    return [ending["outcome"] for ending, _ in answers.of_batch(lambda: value, size, 100)]


def test_an_answer_for_each():
    values = [{"a": 1}, Skip("x"), Permanent("x"), Retry("x"), KeyError("x"), Cancelled("x"), object(), "x" * 200]
    assert told(values, 8) == ["done", "skipped", "failed", "failed", "failed", "cancelled", "failed", "failed"]


@pytest.mark.parametrize("value", [[1], [1, 2, 3], (1, 2), None, "12"])
def test_what_is_no_answer_for_each_is_one_for_nobody(value):
    assert told(value, 2) == ["handed_back"] * 2


def test_a_batch_of_one_is_answered_as_if_it_ran_by_itself():
    def never() -> None:
        raise Permanent("never")

    (answer,) = answers.of_batch(never, 1, 100)
    assert answer == answers.of_job(never, 100)


def test_who_asks_for_a_pause_for_all_of_them_gets_it():
    def later() -> None:
        raise Retry("later", after=7)

    said = [ending for ending, _ in answers.of_batch(later, 2, 100)]
    assert [(one["outcome"], one["error_kind"], one["retry_after_s"]) for one in said] == [
        ("handed_back", "batch", 7)
    ] * 2


# --- what becomes of each ---


def claims(*limits: float | None) -> tuple[Claim, ...]:
    """The second bears the lease."""
    return tuple(Claim(f"j{n}", 1, "many", "{}", "a", None, limit, None, None, "j1") for n, limit in enumerate(limits))


def outcomes(run: Run) -> dict[str, tuple[Outcome, ErrorKind | None]]:
    return {end.job_id: (end.outcome, end.error_kind) for end in run.ends_of_dead(-9)}


def test_the_end_of_the_one_whose_lease_it_is_comes_last():
    ends = Run(claims(None, None, None)).ends_of_dead(-9)
    assert [(end.job_id, end.left.remains) for end in ends] == [
        ("j0", Remains.SHARED),
        ("j2", Remains.SHARED),
        ("j1", Remains.NOTHING),
    ]


def test_results_are_told_apart_by_their_length():
    run = Run(claims(None, None))
    ending = {"outcome": "done", "run_seconds": 0.1}
    ends = {end.job_id: end.result for end in run.ends([ending | {"size": 4}, ending | {"size": 2}], '"ä""b')}
    assert ends == {"j0": '"ä""', "j1": "b"}
    with pytest.raises(ValueError, match="shorter"):
        run.ends([ending], "")


def test_a_time_limit_is_the_fault_of_those_who_have_it():
    run = Run(claims(2.0, None, 1.0, 1.0))
    assert run.deadline == run.since + 1.0
    run.overrun()
    late, back = (Outcome.FAILED, ErrorKind.TIMEOUT), (Outcome.HANDED_BACK, None)
    assert outcomes(run) == {"j0": back, "j1": back, "j2": late, "j3": late}


def test_a_lost_gpu_is_lost_for_all():
    run = Run(claims(None, None))
    run.lose_gpu("gone")
    assert set(outcomes(run).values()) == {(Outcome.FAILED, ErrorKind.GPU_LOST)}


def test_of_several_nobody_is_charged_with_a_crash():
    assert set(outcomes(Run(claims(None, None))).values()) == {(Outcome.HANDED_BACK, ErrorKind.BATCH)}
    assert set(outcomes(Run(claims(None))).values()) == {(Outcome.FAILED, ErrorKind.WORKER_LOST)}


@pytest.fixture
def slot():
    """Its process is long gone: signals reach nobody."""
    ours, theirs = Channel.pair()
    found = SlotProcess(SimpleNamespace(pid=2**22 + 1), ours, Flags(), "w#1", ready=True)  # type: ignore[arg-type]
    found.take(claims(None, None, None))
    yield found
    found.flags.close()
    ours.close()
    theirs.close()


def test_a_cancel_reaches_the_one_that_is_meant(slot):
    slot.cancel("j2", 1.0)
    assert [slot.flags.is_up(place) for place in range(4)] == [False, False, True, False]
    slot.take(claims(None))
    assert not slot.flags.is_up(2)


def test_for_one_of_several_nobody_insists_but_it_ends_in_time(slot):
    slot.cancel("j0", 10.0)
    begun = slot.run.term_at
    slot.cancel("j1", 10.0)
    assert slot.run.term_at == begun
    slot.look_at_clock(begun)
    assert not (slot.worn or slot.dying)
    slot.look_at_clock(slot.run.kill_at)
    assert slot.dying
    stopped, back = (Outcome.CANCELLED, ErrorKind.TRANSIENT), (Outcome.HANDED_BACK, None)
    assert outcomes(slot.run) == {"j0": stopped, "j1": stopped, "j2": back}


def test_if_nobody_wants_it_any_more_it_is_told_to_stop(slot):
    for job_id in ("j0", "j1", "j2"):
        slot.cancel(job_id, 10.0)
    slot.look_at_clock(slot.run.term_at)
    assert slot.worn


def test_a_slot_that_speaks_of_a_job_it_does_not_run_is_not_understood(slot):
    ours, theirs = Channel.pair()
    told: Any = SlotEvents(*[lambda *_given: None] * 5)
    lifeline = Lifeline()
    pool = SlotPool(1, "w", [], {}, told, 1.0, lifeline)
    slot.pipe = ours
    pool._selector.register(ours, EVENT_READ, slot)
    theirs.send({"progress": [0.5, ""], "place": 2})
    pool._hear(slot)
    assert not slot.dying
    theirs.send({"progress": [0.5, ""], "place": 3})
    pool._hear(slot)
    assert slot.dying
    pool._selector.close()
    pool.close()
    lifeline.close()
    ours.close()
    theirs.close()


def test_a_slot_starts_without_what_only_its_supervisor_needs():
    """Each process would pay for it at every start."""
    look = "import sys, worker.slot; print(*{'pydantic', 'sqlalchemy', 'redis'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


# --- how large they were ---


def test_sizes_are_counted_up_to_their_bounds():
    sizes = Sizes()
    for size in (1, 2, 3, 4, 32, 1000):
        sizes.count(size)
    assert sizes.calls == [1, 1, 2, 0, 0, 1, 0, 0, 0, 0, 1]
    assert sizes.summary() == {"calls": 6, "jobs": 1042, "mean": 173.67}
    assert batch_sizes.from_text(batch_sizes.to_text({"many": sizes})) == {"many": sizes}
    assert (batch_sizes.to_text({}), batch_sizes.from_text(None)) == (None, {})
