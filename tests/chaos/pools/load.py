"""Jobs trickle in, over HTTP, while it storms: into the lanes of pools, open or not, and into the default lane."""

import threading
from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import Any

import httpx

from orchestrator.jobs import new_job_id
from tests.chaos.history import Recorder
from tests.chaos.kinds import Submitted
from tests.chaos.pools.wishes import Wish

#: Share of jobs without a pool.
WITHOUT_POOL = 0.2
#: Seconds that a job runs: most hardly at all, a few longer than any drain waits.
DURATIONS, WEIGHTS = ((0.0, 0.2), (0.5, 2.0), (8.0, 12.0)), (70, 25, 5)


class Load:
    """`flow` lets jobs in or holds them up. A request without an answer is sent again under the same id."""

    def __init__(
        self, urls: Sequence[str], wishes: Sequence[Wish], recorder: Recorder, rng: Random, ledger: str, per_s: float
    ) -> None:
        self._urls = cycle(urls)
        self._wishes = wishes
        self._recorder = recorder
        self._rng = rng
        self._ledger = ledger
        self._pause_s = 1 / per_s
        self._flows = threading.Event()
        self._still = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pools-load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def flow(self) -> None:
        self._still.clear()
        self._flows.set()

    def hold(self) -> None:
        """Returns when the last request has been answered."""
        self._flows.clear()
        self._still.wait()

    def close(self) -> None:
        self._stop.set()
        self._flows.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=10) as client:
            while not self._stop.is_set():
                if not self._flows.is_set():
                    self._still.set()
                    self._flows.wait()
                    continue
                self._submit(client, self._draw())
                self._stop.wait(self._rng.uniform(0, 2 * self._pause_s))
        self._still.set()

    def _draw(self) -> dict[str, Any]:
        rng = self._rng
        seconds = rng.uniform(*rng.choices(DURATIONS, WEIGHTS)[0])
        body: dict[str, Any] = {"job_id": new_job_id(), "max_attempts": 100}
        if rng.random() < WITHOUT_POOL:
            payload = {"ledger": self._ledger, "seconds": min(seconds, 2.0), "memory_mb": 500}
            return body | {"type": "chaos.allocate", "payload": payload}
        wish = rng.choice(self._wishes)
        payload = {"ledger": self._ledger, "seconds": seconds}
        return body | {"type": wish.type, "pool_id": wish.pool_id, "payload": payload}

    def _submit(self, client: httpx.Client, body: dict[str, Any]) -> None:
        job = Submitted(body["job_id"], body.get("pool_id", "default"), frozenset({"done"}))
        while not self._stop.is_set():
            try:
                answer = client.post(f"{next(self._urls)}/jobs/submit", json=body)
            except httpx.HTTPError:
                self._stop.wait(0.05)
                continue
            if answer.status_code >= 500:
                continue
            if answer.is_success:
                self._recorder.accept(job)
            else:
                self._recorder.incident("INV-5", job.job_id, f"was refused: {answer.text}")
            return
