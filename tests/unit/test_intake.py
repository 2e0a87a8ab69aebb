"""Those who take jobs in are told to stop: they wait for nothing any more."""

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from worker.intake import Intake
from worker.roster import Roster


def intake_of(slots: Roster, **reader: Any) -> Intake:
    given: Any = Mock(db_timeout_s=1.0)
    told: dict[str, Any] = dict.fromkeys(("vouched", "no_room", "on_read", "on_refused", "on_denied"))
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
