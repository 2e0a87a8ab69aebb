"""The clients of a chaos run: submit jobs over HTTP to whoever answers, and remember what was accepted."""

import threading
from collections import deque
from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import Any

import httpx

from tests.chaos.history import Recorder
from tests.chaos.kinds import KINDS, Body, Kind, Submitted, draw
from tests.chaos.sites import Site

#: Most jobs in one request.
BATCH = 25
#: Share of requests that are sent a second time although they were answered.
TWICE = 0.03
#: Share of requests after which one of the youngest jobs is cancelled, wherever it is by then.
CANCELLED, YOUNGEST = 0.25, 100


class Load:
    """Submits `count` jobs, as fast as `allow` lets it. A request without an answer is sent again, ids unchanged."""

    def __init__(
        self, sites: list[Site], recorder: Recorder, rng: Random, count: int, ledger: str, kinds: Sequence[Kind] = KINDS
    ) -> None:
        self._urls = cycle([site.url for site in sites])
        self._recorder = recorder
        self._rng = rng
        self._count = count
        self._ledger = ledger
        self._kinds = kinds
        self._allowed = 0
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self.drawn = 0
        self.lost_answers = 0
        self._youngest: deque[str] = deque(maxlen=YOUNGEST)
        self._thread = threading.Thread(target=self._run, name="chaos-load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def allow(self, jobs: int) -> None:
        """Let this many jobs, from the first on, be submitted."""
        with self._changed:
            self._allowed = max(self._allowed, min(jobs, self._count))
            self._changed.notify()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=10) as client:
            while self.drawn < self._count and not self._stop.is_set():
                with self._changed:
                    self._changed.wait_for(lambda: self._allowed > self.drawn or self._stop.is_set())
                self._submit(client, self._draw(min(self._rng.randint(1, BATCH), self._allowed - self.drawn)))
                if self._youngest and self._rng.random() < CANCELLED:
                    self._cancel(client, self._rng.choice(self._youngest))

    def _draw(self, count: int) -> list[tuple[Body, Submitted]]:
        drawn = [draw(self._rng, self._kinds, self.drawn + number, self._ledger) for number in range(count)]
        self.drawn += count
        return drawn

    def _submit(self, client: httpx.Client, drawn: list[tuple[Body, Submitted]]) -> None:
        while drawn and not self._stop.is_set():
            answers = self._post(client, [body for body, _ in drawn])
            if answers is None:
                self.lost_answers += 1
                self._stop.wait(0.05)
                continue
            for (_, job), answer in zip(drawn, answers, strict=True):
                self._take(job, answer)
            if self._rng.random() >= TWICE:
                return

    def _post(self, client: httpx.Client, bodies: list[Body]) -> list[dict[str, Any]] | None:
        """The answers, one for each; None when there was none."""
        single = len(bodies) == 1
        path, body = ("/jobs/submit", bodies[0]) if single else ("/jobs/submit_batch", {"jobs": bodies})
        try:
            answer = client.post(next(self._urls) + path, json=body)
        except httpx.HTTPError:
            return None
        if answer.status_code >= 500:
            return None
        return [answer.json()] if single else list(answer.json()["jobs"])

    def _cancel(self, client: httpx.Client, job_id: str) -> None:
        """Once: without an answer it may be cancelled or not."""
        self._recorder.cancel_asked.add(job_id)
        try:
            answer = client.post(f"{next(self._urls)}/jobs/{job_id}/cancel")
        except httpx.HTTPError:
            return
        if answer.is_success:
            self._recorder.cancel_granted.add(job_id)

    def _take(self, job: Submitted, answer: dict[str, Any]) -> None:
        if "created" not in answer:
            self._recorder.incident("INV-5", job.job_id, f"was refused: {answer}")
        elif self._recorder.accept(job):
            self._youngest.append(job.job_id)
        elif answer["created"]:
            self._recorder.incident("INV-5", job.job_id, "was created a second time")
