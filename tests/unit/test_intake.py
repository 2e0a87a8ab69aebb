"""Those who take jobs in while Redis is away, and when they are told to stop: then they wait for nothing any more."""

import random
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator.errors import DatabaseUnavailable, RedisUnavailable, Unavailable
from worker.intake import TOLD_AFTER_S, Failing, Intake
from worker.roster import Roster


def intake_of(slots: Roster, **reader: Any) -> Intake:
    given: Any = Mock(db_timeout_s=1.0)
    told: dict[str, Any] = dict.fromkeys(("no_room", "on_read", "on_refused", "on_broken", "on_denied"))
    told["vouched"] = lambda: True
    return Intake(given, given, given, SimpleNamespace(**reader), slots, given, given, given, **told)  # type: ignore[arg-type]


def test_nobody_waits_for_room_any_more():
    full = Roster(1, 1.0)
    waits = threading.Thread(target=full.wait_room, args=(600.0,), daemon=True)
    waits.start()
    intake_of(full).stop()
    waits.join(30.0)
    assert not waits.is_alive()


def test_a_redis_that_does_not_answer_is_not_asked_again_to_end_a_read():
    """Each time would cost its worker redis_timeout_s, while its jobs have a deadline."""
    ear = Mock(interrupt=Mock(side_effect=[True, False]))
    intake = intake_of(Roster(1, 1.0), ear=ear)
    for _ in range(3):
        intake.interrupt()
    assert ear.interrupt.call_count == 2


class Pauses(threading.Event):
    """Takes no time, notes how long each pause would be, and ends the loop after so many."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        if len(self.seconds) >= self._count:
            self.set()
        return self.is_set()


def away(*_asked: Any) -> None:
    raise RedisUnavailable("refused")


def free_slots() -> Any:
    return Mock(wait_room=lambda *_given, **_more: 1, batching=Mock(sizes={}))


def test_who_cannot_read_tries_later_and_later_and_never_gives_up(monkeypatch: pytest.MonkeyPatch):
    """Without pauses it would spin. After half an hour it has failed a thousand times: no number may be too large."""
    monkeypatch.setattr(random, "uniform", lambda _least, most: most)
    intake = intake_of(free_slots(), read=away)
    intake._stop = pauses = Pauses(1100)
    intake._loop()
    assert len(pauses.seconds) == 1100
    assert pauses.seconds == sorted(pauses.seconds)
    assert 0.0 < pauses.seconds[0] < 1.0 <= pauses.seconds[-1] <= 5.0


def reading(read: Any) -> Intake:
    """One whose reads may also succeed."""
    intake = intake_of(free_slots(), read=read)
    intake._on_read = lambda _count, _dry: None
    intake._held = Mock(entry_ids=set)
    return intake


@pytest.mark.parametrize("vouched", [True, False])
def test_who_may_be_counted_as_lost_by_the_end_of_a_read_claims_nothing(vouched: bool):
    """A read may wait for long; what a lost worker claims is taken from it again, as a crash of the job."""
    answers = iter([True, vouched])
    entry = SimpleNamespace(entry_id="1-1", job_id="job", type="echo")
    intake = reading(lambda *_asked: [entry])
    intake._vouched = lambda: next(answers)
    intake._claim, intake._put_back = Mock(), Mock()  # type: ignore[method-assign]
    intake._step()
    assert (intake._claim.called, intake._put_back.called) == (vouched, not vouched)


def test_who_could_read_again_begins_with_short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random, "uniform", lambda _least, most: most)
    fails = 3 * [RedisUnavailable("refused")]
    intake = reading(Mock(side_effect=[*fails, [], *fails]))
    intake._stop = pauses = Pauses(6)
    intake._loop()
    assert pauses.seconds[3:] == pauses.seconds[:3]


def test_a_pause_ends_when_it_is_told_to_stop(monkeypatch: pytest.MonkeyPatch):
    pauses = threading.Event()

    def for_hours(*_bounds: float) -> float:
        pauses.set()
        return 100_000.0

    monkeypatch.setattr(random, "uniform", for_hours)
    intake = intake_of(free_slots(), read=away)
    intake.start()
    assert pauses.wait(30.0)
    intake.stop()
    intake._thread.join(30.0)
    assert not intake.is_alive


@pytest.mark.parametrize("error", [RedisUnavailable, DatabaseUnavailable])
def test_who_cannot_read_for_a_while_says_so_until_it_can_or_need_not(
    monkeypatch: pytest.MonkeyPatch, error: type[Unavailable]
):
    """Each read takes a good half of what lasts. A database that is away is no matter of Redis."""
    said: list[str | None] = []
    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def read(*_asked: Any) -> list[Any]:
        said.append(intake.trouble)
        clock.now += 0.6 * TOLD_AFTER_S
        if len(said) == 4:
            return []
        raise error("refused")

    monkeypatch.setattr("worker.intake.time", clock)
    intake: Intake = reading(read)
    intake._stop = Pauses(8)
    intake._loop()
    told = [bool(trouble) for trouble in said]
    lasts = error is RedisUnavailable
    assert told == [False, False, False, lasts, False, False, False, lasts, lasts]
    assert intake.trouble is None, "it was told to stop"
    if lasts:
        assert said[3] and said[3].endswith(": refused") and "gpuorch doctor" in said[3]


def test_a_database_that_is_away_is_not_told_as_redis(monkeypatch: pytest.MonkeyPatch):
    """Redis failed once; since then it answers, and claims fail."""
    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    errors = iter([RedisUnavailable("refused"), DatabaseUnavailable("away"), DatabaseUnavailable("away")])

    def read(*_asked: Any) -> list[Any]:
        clock.now += 0.6 * TOLD_AFTER_S
        raise next(errors)

    monkeypatch.setattr("worker.intake.time", clock)
    intake: Intake = reading(read)
    intake._stop = Pauses(3)
    intake._loop()
    intake._stop.clear()
    assert intake.trouble is None


def test_who_has_no_slot_free_is_not_in_trouble():
    """One answer of Redis got lost after the last claim: the next read is hours away."""
    said: list[str | None] = []

    def wait_room(*_given: Any, **_more: Any) -> int:
        said.append(intake.trouble)
        if len(said) == 2:
            intake._stop.set()
        return 0

    intake = intake_of(Mock(wait_room=wait_room))
    intake._failing = Failing(-TOLD_AFTER_S, RedisUnavailable("refused"))
    intake._loop()
    assert said[0] and said[1] is None
