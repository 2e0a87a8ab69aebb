"""Acknowledgements of several lanes on one thread: each to its own, and none lost to another's trouble."""

from typing import Any

from orchestrator.errors import RedisUnavailable
from worker.acknowledger import Acknowledger


class Lane:
    def __init__(self, name: str, *, away: bool = False) -> None:
        self.name = name
        self.acked: list[str] = []
        self._away = away

    def ack(self, entry_ids: list[str]) -> None:
        if self._away:
            raise RedisUnavailable("nobody there")
        self.acked += entry_ids


def test_each_lane_gets_its_own():
    chat, draw, broken = (Lane(name, away=name == "broken") for name in ("chat", "draw", "broken"))
    acks = Acknowledger()
    given: list[tuple[Any, list[str]]] = [(broken, ["9-9"]), (chat, ["1-1"]), (draw, ["2-2"]), (chat, ["1-2"])]
    for lane, entry_ids in given:
        acks.add(lane, entry_ids, may_wait=True)
    acks.flush(5.0)
    assert (chat.acked, draw.acked, broken.acked) == (["1-1", "1-2"], ["2-2"], [])
    acks.close(5.0)
