"""What it would cost to delete this worker's pod, so that whoever scales down begins with those that are idle.

Kubernetes takes it as a hint and asks not to change it often: it is written when the worker changes from idle to busy
to full or back, and not more often than every `REST_S`. A thread of its own, best effort: nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from orchestrator.backoff import doubled
from orchestrator.errors import KubernetesUnavailable
from orchestrator.kubernetes import Kubernetes, Pod
from orchestrator.settings import Settings

log = logging.getLogger(__name__)

#: Idle pods go first, those with every slot in use last. 0 is what Kubernetes assumes of pods that say nothing.
IDLE, BUSY, FULL = 0, 100, 200
#: Seconds between two looks; between two writes; and, at most, before one that failed is tried again.
LOOK_EVERY_S = 1.0
REST_S = 10.0
LONGEST_REST_S = 300.0


def cost(busy: int, slots: int) -> int:
    if not busy:
        return IDLE
    return BUSY if busy < slots else FULL


class PriceTag:
    """`load` tells how many slots are in use, and how many there are."""

    def __init__(self, settings: Settings, load: Callable[[], tuple[int, int]]) -> None:
        self._kubernetes = Kubernetes(settings)
        self._pod = Pod(settings.kubernetes_namespace, str(settings.pod_name))
        self._load = load
        self._told: int | None = None
        self._rest_until = 0.0
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pod-price", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Without waiting: a pod that leaves needs no price."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.look(time.monotonic())
            except Exception:
                log.exception("deletion cost broke")

    def look(self, now: float) -> None:
        """Write the price if it is another one and the last was not written just now."""
        wanted = cost(*self._load())
        if wanted == self._told or now < self._rest_until:
            return
        try:
            self._kubernetes.price(self._pod, wanted)
        except KubernetesUnavailable as refused:
            self._failures += 1
            log.warning("deletion cost not written", extra={"error": str(refused), "runbook": "scaling"})
        else:
            self._told, self._failures = wanted, 0
        self._rest_until = now + doubled(REST_S, self._failures, LONGEST_REST_S)
