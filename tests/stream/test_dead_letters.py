"""The dead-letter stream: what it is told, and by whom."""

import pytest

from orchestrator.dead_letters import DeadLetter
from orchestrator.errors import StaleEpoch


def test_dead_letters_say_what_died_and_why(hub, raw):
    hub.dead_letters.tell([])
    assert not raw.exists("stream:orchestrator:dlq")
    hub.dead_letters.tell([DeadLetter("j", "1-1", 3, "x" * 5000, "worker_lost")])
    ((_id, letter),) = raw.xrange("stream:orchestrator:dlq")
    assert {key: value for key, value in letter.items() if key != "last_error"} == {
        "job_id": "j",
        "origin_id": "1-1",
        "attempts": "3",
        "reason": "worker_lost",
    }
    assert len(letter["last_error"]) == 1000


def test_a_leader_that_was_replaced_tells_of_no_dead_letter(hub, raw):
    letters = [DeadLetter(f"j{i}", "", 3, "x" * 5000, "worker_lost") for i in range(2)]
    told = hub.dead_letters.tell_as_leader(8, letters)
    with pytest.raises(StaleEpoch) as refused:
        hub.dead_letters.tell_as_leader(7, letters)
    assert refused.value.newest == 8
    found = raw.xrange("stream:orchestrator:dlq")
    assert ([entry_id for entry_id, _ in found], [letter["job_id"] for _, letter in found]) == (told, ["j0", "j1"])
    assert {(letter["attempts"], letter["reason"], len(letter["last_error"])) for _, letter in found} == {
        ("3", "worker_lost", 1000)
    }
    assert hub.dead_letters.tell_as_leader(7, []) == []
