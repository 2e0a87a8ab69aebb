"""How large batches were: counted by workers, told with their heartbeats, added up by whoever serves metrics."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from orchestrator.batching import MAX_BATCH

#: Sizes up to which batches are counted together.
BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, MAX_BATCH)


@dataclass
class Sizes:
    """Of one job type: calls by bound, and the jobs in all of them."""

    calls: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    jobs: int = 0

    def count(self, size: int) -> None:
        self.calls[bisect_left(BOUNDS, size)] += 1
        self.jobs += size

    def since(self, before: Self) -> Self:
        calls = [now - then for now, then in zip(self.calls, before.calls, strict=True)]
        return type(self)(calls, self.jobs - before.jobs)

    def summary(self) -> dict[str, Any]:
        calls = sum(self.calls)
        return {"calls": calls, "jobs": self.jobs, "mean": round(self.jobs / calls, 2) if calls else None}


#: By job type.
BatchSizes = dict[str, Sizes]


def to_text(by_type: Mapping[str, Sizes]) -> str | None:
    """As a worker's row keeps it; None before the first batch."""
    said = {type: {"calls": sizes.calls, "jobs": sizes.jobs} for type, sizes in list(by_type.items())}
    return json.dumps(said) if said else None


def from_text(text: str | None) -> BatchSizes:
    return {type: Sizes(**said) for type, said in json.loads(text).items()} if text else {}
