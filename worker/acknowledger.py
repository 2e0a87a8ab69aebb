"""Acknowledges what is settled, for all lanes of a supervisor, beside whoever settles the next jobs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import wait
from typing import NamedTuple

from orchestrator.errors import RedisUnavailable
from orchestrator.store.batcher import Batcher
from orchestrator.stream.lane import Lane

log = logging.getLogger(__name__)

#: Seconds that acknowledgements wait for those of the next commits, while their lane is busy: nobody waits for them.
LINGER_S = 0.05


class Settled(NamedTuple):
    #: None: somebody waits for those before.
    lane: Lane | None
    entry_ids: Sequence[str]
    #: More of them are about to come.
    may_wait: bool


class Acknowledger:
    def __init__(self) -> None:
        self._batcher: Batcher[Settled, None] = Batcher(
            "acknowledger",
            self._acknowledge,
            weight=lambda settled: len(settled.entry_ids),
            linger=lambda: LINGER_S,
            urgent=lambda settled: not settled.may_wait,
        )

    def add(self, lane: Lane, entry_ids: Sequence[str], *, may_wait: bool) -> None:
        self._batcher.post(Settled(lane, entry_ids, may_wait))

    def flush(self, timeout_s: float) -> None:
        """Wait until Redis knows what was added so far, or does not answer."""
        wait([self._batcher.submit(Settled(None, (), may_wait=False))], timeout_s)

    def close(self, timeout_s: float) -> None:
        self._batcher.close(timeout_s)

    def _acknowledge(self, settled: list[Settled]) -> list[None]:
        by_lane: dict[str, tuple[Lane, list[str]]] = {}
        for lane, entry_ids, _ in settled:
            if lane is not None:
                by_lane.setdefault(lane.name, (lane, []))[1].extend(entry_ids)
        for lane, ids in by_lane.values():
            try:
                lane.ack(ids)
            except RedisUnavailable as away:
                # The leader drops entries whose job is over.
                log.warning("acknowledgements lost", extra={"entries": len(ids), "error": str(away)})
        return [None] * len(settled)
