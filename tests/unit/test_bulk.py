"""Which of very many are changed: the first that may be, looked for no further than needed."""

import asyncio
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

from orchestrator.api import bulk
from orchestrator.api.bulk import Chosen, choose
from orchestrator.store.dead_letters import Meant

START = datetime(2026, 1, 1, tzinfo=UTC)


def meant(n: int, redrives: int = 0, *, is_task: bool = False) -> Meant:
    return Meant(START + timedelta(seconds=n), f"j-{n}", redrives, is_task)


class Many:
    """Windows of three: a task, one that was started over twice, one that never was."""

    def __init__(self, windows: int = 50) -> None:
        self.windows = windows
        self.looks = 0

    async def read(self, work: Any) -> Any:
        return work(None)

    def look(self, _conn: Any, cursor: str | None) -> tuple[list[Meant], str | None]:
        n = int(cursor or 0)
        self.looks += 1
        found = [meant(3 * n, is_task=True), meant(3 * n + 1, 2), meant(3 * n + 2)]
        return found, str(n + 1) if n + 1 < self.windows else None


def chosen(windows: Many, most: int, redrive_max: float) -> Chosen:
    return asyncio.run(choose(windows, windows.look, most, redrive_max))  # type: ignore[arg-type]


def test_it_looks_until_there_are_enough_and_as_many_are_counted_as_anybody_wants_to_know(monkeypatch):
    monkeypatch.setattr(bulk, "MOST_COUNTED", 10)
    windows = Many()
    found = chosen(windows, 2, 2)
    assert (found.ids, found.told(), windows.looks) == (["j-2", "j-5"], {"matched": 10, "exhausted": 4}, 4)
    windows = Many()
    assert (chosen(windows, 5, 2).ids[-1], windows.looks) == ("j-14", 5)


def test_without_a_limit_of_redrives_only_tasks_stay():
    found = chosen(Many(2), 10, inf)
    assert (found.ids, found.told()) == (["j-1", "j-2", "j-4", "j-5"], {"matched": 6})


def test_of_those_that_are_named_the_ones_that_no_window_has_are_told():
    windows = Many(2)
    found = asyncio.run(choose(windows, windows.look, 10, named=["x", "j-5", "j-0", "x"]))  # type: ignore[arg-type]
    assert found.told() == {"matched": 6, "unknown": ["x"]}


def test_of_two_kinds_the_oldest_are_chosen():
    failed, dead = Chosen(2), Chosen(2)
    failed.add([meant(1), meant(4)])
    dead.add([meant(2), meant(3), meant(5)])
    both = failed.join(dead)
    assert (both.ids, both.matched) == (["j-1", "j-2"], 5)
