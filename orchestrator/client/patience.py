"""Waiting for a server that says "later", or that is away for a moment.

What is sent again, and what is not:

- 429 and 503 say when to come again, and are obeyed. A 503 may have come after the work was done (the answer of the
  database got lost), so only what is `repeatable` is sent again then.
- A server that did not answer may have got the request. Only what is `repeatable` is sent again, or what cannot have
  left this machine.
- A 502, a 504 or an answer that nobody can read is that of something before a server that restarts: nobody knows what
  became of the request. Only what is `repeatable` is sent again.
- `repeatable` is what comes to the same when it is sent twice: whatever only reads; a submit, a pool and a workflow,
  because their ids are made before they are sent for the first time; what sets a value (cancel, priority, scale, drain,
  evict, release).
- A server that never answered is no server that restarts: nobody waits for it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.cancellation import Cancellation
from orchestrator.client.errors import Refused, ServerUnreachable
from orchestrator.client.steps import Operation, Pause, Request
from orchestrator.client.wire import Contact

log = logging.getLogger(__name__)

#: Seconds for which a server that did answer before may be away: it restarts.
AWAY_S = 120.0
#: Seconds before the next try where the server does not say.
RETRY_S = 1.0
#: Answers that mean: later.
BUSY = frozenset({429, 503})


@dataclass(frozen=True)
class Later:
    retry_after_s: float
    error: Refused | ServerUnreachable


class Patience:
    """That of one caller, for `seconds` since it last got on. `on_wait` is told each reason that differs from the last.

    Threads may share one. With a `stop` that is cancelled nobody waits any more.
    """

    def __init__(
        self,
        contact: Contact,
        seconds: float,
        on_wait: Callable[[str], None] | None = None,
        *,
        away_s: float | None = None,
        stop: Cancellation | None = None,
    ) -> None:
        self._contact, self._seconds, self._stop = contact, seconds, stop
        self._away_s = AWAY_S if away_s is None else away_s
        self._on_wait = on_wait or _log_wait
        self._progress_at = time.monotonic()
        self._told = ""

    def progress(self) -> None:
        self._progress_at = time.monotonic()

    def ask(self, request: Request) -> Operation[Any]:
        """The answer, or `Later`. Raises Refused when waiting does not help, or ServerUnreachable."""
        try:
            return (yield request)
        except ServerUnreachable as away:
            if not self._worth(request, away):
                raise
            return Later(RETRY_S, away)
        except Refused as refused:
            if refused.status != 429 and not (request.repeatable and refused.says_nothing_of_it):
                raise
            return Later(refused.retry_after_s or RETRY_S, refused)

    def insist(self, request: Request) -> Operation[Any]:
        """The answer, however often it has to be sent. Raises Refused or ServerUnreachable."""
        while True:
            answer = yield from self.ask(request)
            if not isinstance(answer, Later):
                self.progress()
                return answer
            moment = time.monotonic() + spread(answer.retry_after_s)
            if not (yield from self.wait_until(moment, str(answer.error))):
                raise answer.error

    def wait_until(self, moment: float, reason: str) -> Operation[bool]:
        """False, at once, when that is later than anybody would wait, or nobody waits any more."""
        if moment > self._progress_at + self._seconds:
            return False
        if reason != self._told:
            self._told = reason
            self._on_wait(reason)
        stopped: bool = yield Pause(max(moment - time.monotonic(), 0.0), self._stop)
        return not stopped

    def _worth(self, request: Request, away: ServerUnreachable) -> bool:
        if away.sent and not request.repeatable:
            return False
        since = self._contact.answered_at
        return away.sent if since is None else time.monotonic() - since <= self._away_s


def spread(seconds: float) -> float:
    """Never earlier than told, and not all who wait at the same moment."""
    return seconds * random.uniform(1.0, 1.1)


def _log_wait(reason: str) -> None:
    log.info("waiting for the server: %s", reason)
