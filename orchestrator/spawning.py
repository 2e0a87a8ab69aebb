"""Tasks that a running job adds, on their way: what a handler asked for, and which jobs become of it.

Pure, and light, since every slot loads it. They travel in frames of entries. An entry is one task, a run of a map's
parts, or the task that collects a map. Parts are numbered, never written out: those of a range are three numbers,
however many they are.

    frame = {"base": ID, "entries": [entry, …]}        a task's id is BASE.NUMBER
    entry = {"n", "count", "type", "payload", "options", "optional",
             "needs": numbers of tasks that were added before,
             "range": [start, stop, step], "chunk", "index"   or   "items": [[…], …], "index",
             "then": number of the task that gets the results of these parts,
             "parts": of how many parts this one gets the results}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import InvalidInput

#: Tasks that one attempt may add.
MAX_TASKS = 1_000_000
#: What a task has from the job that adds it, or cannot have.
RESERVED = frozenset({"type", "payload", "job_id", "workflow_id", "agent", "earliest_start_at"})


@dataclass(frozen=True)
class Spawned:
    """One task that is to become a job."""

    number: int
    job_id: str
    type: str
    payload: dict[str, Any]
    options: dict[str, Any]
    optional: bool
    #: Ids of the tasks it waits for, of which it gets the results in this order.
    needs: tuple[str, ...]
    #: Of how many parts it gets the results, which come after it.
    parts: int | None
    #: The task that gets its result, and in which place.
    feeds: tuple[str, int] | None


def count(body: str) -> int:
    """How many tasks a frame has."""
    return sum(int(entry["count"]) for entry in json.loads(body)["entries"])


def tasks(body: str, first: int, most: int) -> list[Spawned]:
    """Of a frame's tasks, so many from this one on. Raises InvalidInput for what `samples` has not seen so."""
    try:
        return _tasks(json.loads(body), first, most)
    except (ValueError, LookupError, TypeError) as broken:
        raise InvalidInput(f"they cannot be read ({type(broken).__name__}: {broken})") from broken


def _tasks(frame: dict[str, Any], first: int, most: int) -> list[Spawned]:
    found: list[Spawned] = []
    for entry in frame["entries"]:
        here = max(min(int(entry["count"]) - first, most - len(found)), 0)
        found += [_task(frame["base"], entry, place) for place in range(first, first + here)] if here else []
        first = max(first - int(entry["count"]), 0)
        if len(found) >= most:
            break
    return found


def samples(body: str) -> Iterator[Spawned]:
    """The first and the last task of each entry: the others are like them. Raises InvalidInput."""
    frame = json.loads(body)
    for entry in frame["entries"]:
        if taken := sorted(RESERVED & entry.get("options", {}).keys()):
            raise InvalidInput(f"{taken[0]}: no option of a task that a job adds", taken[0])
        for place in sorted({0, int(entry["count"]) - 1}):
            yield _task(frame["base"], entry, place)


def _task(base: str, entry: dict[str, Any], place: int) -> Spawned:
    number = entry["n"] + place
    then = entry.get("then")
    return Spawned(
        number,
        task_id(base, number),
        entry["type"],
        {**entry.get("payload", {}), **_part(entry, place)},
        entry.get("options", {}),
        bool(entry.get("optional")),
        tuple(task_id(base, needed) for needed in entry.get("needs", ())),
        entry.get("parts"),
        None if then is None else (task_id(base, then), entry["index"] + place),
    )


def _part(entry: dict[str, Any], place: int) -> dict[str, Any]:
    """What a part of a map has to do."""
    if "range" in entry:
        index, chunk = entry["index"] + place, entry["chunk"]
        part = range(*entry["range"])[index * chunk : (index + 1) * chunk]
        return {"index": index, "start": part.start, "stop": part.stop, "step": part.step}
    if "items" in entry:
        return {"index": entry["index"] + place, "items": entry["items"][place]}
    return {}


def task_id(base: str, number: int) -> str:
    return f"{base}.{number}"
