"""What is asked again and again and may take long: whoever asks gets the newest answer there is, and waits for none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from orchestrator.errors import Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds for which an answer is as good as a new one, at least and at most. In between it is good for so many times
#: as long as it took: nobody's curiosity may cost more than a small part of a connection.
KEEP_S, KEEP_MOST_S = 1.0, 30.0
SHARE = 20
#: Seconds that somebody waits for a new answer while there is an older one, if that took no longer.
PATIENCE_S = 0.03
#: Seconds that somebody waits when there is none: less than Prometheus does.
LIMIT_S = 3.0
#: Seconds after which an answer is not shown any more, whatever keeps the next one.
OLD_S = 60.0


class _Known(NamedTuple, Generic[T]):
    answer: T
    #: When it was asked for, and until when it is new, on the monotonic clock; seconds that it took.
    asked: float
    new_until: float
    took_s: float


class Reading(Generic[T]):
    """A blocking question, asked by one thread at a time, and only when somebody wants to know.

    A failure is everybody's answer until the question is answered again: what was known before is not shown. Neither is
    it when the question takes longer than `hangs_s`: whoever should answer is as good as gone.
    """

    def __init__(self, ask: Callable[[], T], *, hangs_s: float = OLD_S) -> None:
        self._ask = ask
        self._hangs_s = hangs_s
        self._asking: asyncio.Task[T] | None = None
        self._asked = 0.0
        self._known: _Known[T] | None = None

    async def latest(self) -> T:
        """Raises Unavailable, also when nothing is known and the answer takes too long."""
        known, now = self._known, time.monotonic()
        if known is not None and now < known.new_until:
            return known.answer
        if self._asking is None or self._asking.done():
            self._asked = now
            self._asking = asyncio.create_task(self._refresh())
            # A failure that comes when nobody waits any more is nobody's.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        if known is not None and (now - known.asked >= OLD_S or now - self._asked >= self._hangs_s):
            known = None
        patience = LIMIT_S if known is None else PATIENCE_S if known.took_s <= PATIENCE_S else 0.0
        done, _ = await asyncio.wait({self._asking}, timeout=patience)
        if done:
            return done.pop().result()
        if known is None:
            raise Unavailable(f"no answer within {LIMIT_S:g} seconds")
        return known.answer

    async def _refresh(self) -> T:
        asked = time.monotonic()
        try:
            answer = await asyncio.to_thread(self._ask)
        except Exception as broken:
            self._known = None
            if isinstance(broken, Unavailable):
                raise
            # Whatever it is, a scrape must answer: that is when it is needed.
            log.warning("reading failed", exc_info=True)
            raise Unavailable("it answers, but not as it should") from None
        took_s = time.monotonic() - asked
        new_until = asked + took_s + min(max(SHARE * took_s, KEEP_S), KEEP_MOST_S)
        self._known = _Known(answer, asked, new_until, took_s)
        return answer
