"""What an orchestrator says of the pools that somebody watches: one thread asks, everybody else reads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from orchestrator.client.api import Api
from orchestrator.client.errors import Refused
from orchestrator.client.paths import autoscale_path
from orchestrator.client.steps import Request
from orchestrator.errors import OrchestratorError, Overloaded, Unavailable

log = logging.getLogger(__name__)

#: Seconds between two questions about a pool.
EVERY_S = 0.5
#: Seconds that the orchestrator may take for an answer.
LIMIT_S = 2.0
#: Seconds for which an answer is good enough for who asks once.
FRESH_S = 1.5
#: Seconds that somebody who asks once waits for an answer.
PATIENCE_S = 4.0
#: Seconds for which a pool is asked about after the last who wanted to know: KEDA looks every 30 by default.
INTEREST_S = 120.0
#: Pools that may be watched: whoever names others is refused.
MOST_POOLS = 1000


class Answer(NamedTuple):
    """What was said of a pool, or why nothing was."""

    number: int
    asked_at: float
    says: Mapping[str, Any] | None
    error: OrchestratorError | None = None

    @property
    def value(self) -> Mapping[str, Any]:
        """Raises what went wrong."""
        if self.says is None:
            raise self.error or Unavailable("nothing is known yet")
        return self.says

    @property
    def unknown(self) -> bool:
        """Whether there is no such pool."""
        return isinstance(self.error, Refused) and self.error.status == 404


class Watch:
    def __init__(self, api: Api, every_s: float = EVERY_S) -> None:
        self._api = api
        self._every_s = every_s
        self._answers: dict[str, Answer] = {}
        #: Pool → how many streams watch it; until when it is of interest without any.
        self._streams: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._number = 0
        self._changed = threading.Condition()
        self._poked = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaler-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._poked.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(2 * LIMIT_S)

    @property
    def closed(self) -> bool:
        return self._stop.is_set()

    def ask(self, pool_id: str) -> Mapping[str, Any]:
        """What is known of a pool now. Raises Refused, Overloaded, or Unavailable when nobody says."""
        now = time.monotonic()
        self._note(pool_id, now)
        with self._changed:
            known = self._changed.wait_for(lambda: self._since(pool_id, now - FRESH_S) or self.closed, PATIENCE_S)
            if not known or self.closed:
                raise Unavailable(f"{self._api.url} did not say within {PATIENCE_S:g} s how pool {pool_id!r} is")
            return self._answers[pool_id].value

    def after(self, pool_id: str, number: int, timeout_s: float) -> Answer | None:
        """The first answer about a watched pool after that one; None when none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._newer(pool_id, number) or self.closed, timeout_s)
            return self._answers[pool_id] if self._newer(pool_id, number) else None

    @contextmanager
    def watching(self, pool_id: str) -> Iterator[None]:
        """Ask about it as long as this lasts."""
        self._note(pool_id, time.monotonic())
        with self._changed:
            self._streams[pool_id] = self._streams.get(pool_id, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._streams[pool_id] -= 1
                if not self._streams[pool_id]:
                    del self._streams[pool_id]

    def _note(self, pool_id: str, now: float) -> None:
        with self._changed:
            if pool_id not in self._until and len(self._until) >= MOST_POOLS:
                raise Overloaded(f"{MOST_POOLS} pools are watched already")
            new = pool_id not in self._until
            self._until[pool_id] = now + INTEREST_S
        if new:
            self._poked.set()

    def _since(self, pool_id: str, moment: float) -> bool:
        return pool_id in self._answers and self._answers[pool_id].asked_at >= moment

    def _newer(self, pool_id: str, number: int) -> bool:
        return pool_id in self._answers and self._answers[pool_id].number > number

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._look(self._pools(began))
            except Exception:
                log.exception("watch broke")
            self._poked.wait(max(began + self._every_s - time.monotonic(), 0.0))
            self._poked.clear()

    def _pools(self, now: float) -> list[str]:
        """Those to ask about."""
        with self._changed:
            over = [name for name, until in self._until.items() if until < now and name not in self._streams]
            for name in over:
                del self._until[name]
                self._answers.pop(name, None)
            return [name for name in self._until if self._is_due(name, now)]

    def _is_due(self, pool_id: str, now: float) -> bool:
        """Not those that were asked about just now, when a new one is the reason to look."""
        if (known := self._answers.get(pool_id)) is None:
            return True
        forgotten = known.unknown and pool_id not in self._streams
        return known.asked_at <= now - (FRESH_S if forgotten else self._every_s / 2)

    def _look(self, pools: list[str]) -> None:
        away: OrchestratorError | None = None
        for pool_id in pools:
            asked_at, says, error = time.monotonic(), None, away
            if away is None and not self._stop.is_set():
                try:
                    says = self._api.send(Request("GET", autoscale_path(pool_id), timeout_s=LIMIT_S))
                except Refused as refused:
                    error = refused
                except OrchestratorError as unreachable:
                    # The same server for all of them: each would wait as long for the same.
                    error = away = unreachable
            self._tell(pool_id, asked_at, says, error)

    def _tell(self, pool_id: str, asked_at: float, says: Any, error: OrchestratorError | None) -> None:
        if says is not None and not isinstance(says.get("depth") if isinstance(says, dict) else None, int):
            says, error = None, Unavailable(f"{self._api.url} says nothing of a depth; is it a gpuorch server?")
        with self._changed:
            before = self._answers.get(pool_id)
            self._number += 1
            self._answers[pool_id] = answer = Answer(self._number, asked_at, says, error)
            if answer.unknown and pool_id not in self._streams:
                # Only for those who wait for this answer: names out of the air must not keep real pools waiting.
                self._until[pool_id] = asked_at + FRESH_S
            self._changed.notify_all()
        if error is not None and (before is None or before.error is None):
            log.warning("pool unknown", extra={"pool_id": pool_id, "error": str(error), "runbook": "scaling"})
