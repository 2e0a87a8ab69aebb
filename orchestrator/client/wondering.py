"""Why jobs wait: asked now and then while somebody waits for them, and once more when the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestrator.client.answers import Explanation
from orchestrator.client.steps import Operation
from orchestrator.errors import OrchestratorError

#: Seconds after which whoever waits for a job may wonder why, and then again.
WONDER_S, AGAIN_S = 3.0, 25.0


class Wondering:
    """One caller's wait. `on_wait` is told each lasting reason that differs from the last; if `named`, whose it is."""

    def __init__(
        self,
        explain: Callable[[str], Operation[Explanation]],
        on_wait: Callable[[str], None] | None,
        *,
        named: bool = False,
    ) -> None:
        self._explain, self._on_wait, self._named = explain, on_wait, named
        #: Seconds to wait before it is asked; nobody asks where nobody is told.
        self.pause_s = float("inf") if on_wait is None else WONDER_S
        self._since = time.monotonic()
        self._told: str | None = None

    @property
    def left_s(self) -> float:
        """What is left of the pause."""
        return max(self._since + self.pause_s - time.monotonic(), 0.0)

    def tell(self, job_ids: Sequence[str]) -> Operation[None]:
        """Why they wait, if any of them do."""
        if self._on_wait is None:
            return
        why = (yield from self.why(job_ids)) if job_ids else None
        self.pause_s, self._since = AGAIN_S, time.monotonic()
        if why and why != self._told:
            self._told = why
            self._on_wait(why)

    def why(self, job_ids: Sequence[str]) -> Operation[str | None]:
        """What keeps one of them until somebody does something.

        Of many the first and the last are asked about: the one may run for long, the other has its turn last.
        """
        for job_id in dict.fromkeys((job_ids[0], job_ids[-1])):
            why = yield from self._lasting(job_id)
            if why:
                return f"{job_id}: {why}" if self._named else why
        return None

    def _lasting(self, job_id: str) -> Operation[str | None]:
        """None when it passes by itself, or nobody can tell now."""
        try:
            answer = yield from self._explain(job_id)
        except OrchestratorError:
            return None  # what is wrong, if it stays so, the next look at the job tells
        return answer["message"] if answer.get("lasts") else None  # a server of an older version does not say
