"""Changes to many jobs that ended badly: which of very many are meant, and then a batch of them after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Backend
from orchestrator.api.replies import Json
from orchestrator.store.dead_letters import MOST_COUNTED, Meant, Removed

#: Jobs that one transaction changes.
BATCH = 500
#: Ids that a dry run shows.
SAMPLE = 10

#: (connection, cursor=…) → some of those that are meant, and where the next look begins; None at the end.
Look = Callable[..., tuple[Sequence[Meant], str | None]]
#: (ids, place of the first of them among all, connection) → what left.
Work = Callable[[Sequence[str], int, Any], Removed]
#: (connection, ids, `redrive_max`, seconds that the n-th of them waits) → what left.
Redrive = Callable[[Any, Sequence[str], int, Callable[[int], float]], Removed]


class Bulk(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dry_run: bool = Field(False, description="only tell how many match, and some of their ids")
    max: int = Field(1000, ge=1, le=10_000, description="at most so many, oldest first")


class BulkRedrive(Bulk):
    # The lower end keeps the last of them within months, the upper one means "at once".
    rate: float | None = Field(
        None, ge=0.001, le=10_000, allow_inf_nan=False, description="jobs per second that become due; absent: all now"
    )

    def delay_s(self, place: int) -> float:
        """Whole seconds: those of one second share a statement."""
        return 0.0 if self.rate is None else float(int(place / self.rate))


@dataclass
class Chosen:
    """Those that are meant: how many, how many of them started over too often, and the first that may change."""

    most: int
    redrive_max: float = inf
    matched: int = 0
    exhausted: int = 0
    first: list[Meant] = field(default_factory=list)
    #: Of those that were named, the ones that were not found; None: nobody named any.
    unknown: list[str] | None = None

    def add(self, found: Sequence[Meant]) -> None:
        if self.unknown:
            there = {one.job_id for one in found}
            self.unknown = [job_id for job_id in self.unknown if job_id not in there]
        self.matched += len(found)
        self.exhausted += sum(one.redrives >= self.redrive_max for one in found)
        free = [one for one in found if not one.is_task and one.redrives < self.redrive_max]
        self.first += free[: self.most - len(self.first)]

    def join(self, other: Chosen) -> Chosen:
        """Both, the oldest first."""
        first = sorted([*self.first, *other.first])[: self.most]
        matched, exhausted = self.matched + other.matched, self.exhausted + other.exhausted
        return Chosen(self.most, self.redrive_max, matched, exhausted, first)

    @property
    def enough(self) -> bool:
        return len(self.first) >= self.most and self.matched >= MOST_COUNTED

    @property
    def ids(self) -> list[str]:
        return [one.job_id for one in self.first]

    def told(self) -> dict[str, Any]:
        """As clients see it; `exhausted` only where starting over is what they ask for."""
        counts = {"matched": self.matched} | ({} if self.redrive_max == inf else {"exhausted": self.exhausted})
        named = {} if self.unknown is None else {"unknown": self.unknown}
        return {name: min(count, MOST_COUNTED) for name, count in counts.items()} | named


async def choose(
    api: Backend, look: Look, most: int, redrive_max: float = inf, named: Sequence[str] | None = None
) -> Chosen:
    """One window after the other: each question is short, however many there are that nobody means."""
    unknown = None if named is None else list(dict.fromkeys(named))
    chosen, cursor = Chosen(most, redrive_max, unknown=unknown), None
    while True:
        found, cursor = await api.read(partial(look, cursor=cursor))
        chosen.add(found)
        if cursor is None or chosen.enough:
            return chosen


async def start_over(api: Backend, chosen: Chosen, wish: BulkRedrive, redrive: Redrive) -> Json:
    most = api.settings.redrive_max
    if wish.dry_run:
        return only_looked(chosen, "redriven")

    def work(batch: Sequence[str], first: int, conn: Any) -> Removed:
        return redrive(conn, batch, most, lambda n: wish.delay_s(first + n))

    return Json(chosen.told() | {"redriven": await in_batches(api, chosen.ids, work), "dry_run": False})


def only_looked(chosen: Chosen, verb: str) -> Json:
    ids = chosen.ids
    return Json(chosen.told() | {verb: 0, "dry_run": True, "would_be": len(ids), "sample": ids[:SAMPLE]})


async def in_batches(api: Backend, ids: Sequence[str], work: Work) -> int:
    """Several short transactions: workers must not wait for the locks of thousands of rows."""
    done = 0
    for first in range(0, len(ids), BATCH):
        removed = await api.write(partial(work, ids[first : first + BATCH], first))
        api.left_the_dead(removed)
        done += len(removed.job_ids)
    return done
