"""Keeping a lease: one thread renews it, another one watches the clock.

Two, because a request can hang for longer than its time limits say (looking up a name has none), and the holder must
stop in time all the same. The watch does nothing that could hang.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable

from orchestrator.client.api import Api
from orchestrator.client.asking import Grant
from orchestrator.client.errors import Refused
from orchestrator.client.paths import lease_path
from orchestrator.client.steps import TIMEOUT_S
from orchestrator.errors import OrchestratorError, Unavailable

log = logging.getLogger(__name__)

#: Part of the time to live between two heartbeats, and between two tries while they fail.
BEAT, RETRY = 1 / 3, 1 / 15
#: Seconds that leaving waits for the release at most. A lease that could not be released ends by itself.
RELEASE_S = 5.0


class Keeper:
    """`on_lost` is called once, from one of the two threads, and never after `stop` has begun."""

    def __init__(self, api: Api, grant: Grant, on_lost: Callable[[str], None]) -> None:
        self._api, self._grant, self._on_lost = api, grant, on_lost
        self._until = grant.until
        self._answer_s = min(BEAT * grant.ttl_s, TIMEOUT_S)
        self._stopping = threading.Event()
        self._lost = False
        self._changed = threading.Condition()
        self._beats = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._watches = threading.Thread(target=self._watch, name="lease-watch", daemon=True)

    def start(self) -> None:
        self._beats.start()
        self._watches.start()

    def stop(self) -> None:
        """No more heartbeats; release the lease unless it is lost. Best effort, and never raises."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._lost:
            return
        if self._beats.ident is None:  # it could not even be started
            self._release()
            return
        self._beats.join(RELEASE_S)
        if self._beats.is_alive():
            log.warning("the GPU lease is not released yet; it ends by itself within %g s", self._grant.ttl_s)

    # ── the thread that renews ──────────────────────────────────────────────────────────────────────────────

    def _beat(self) -> None:
        _leave_signals_to_others()
        pause_s = BEAT * self._grant.ttl_s
        while not self._stopping.wait(pause_s * random.uniform(0.9, 1.0)):
            pause_s = (BEAT if self._renew() else RETRY) * self._grant.ttl_s
        if not self._lost:
            self._release()
        self._api.close()

    def _renew(self) -> bool:
        """Whether it lives on for a whole time to live. What may be a passing failure is left to the watch to end."""
        sent_at = time.monotonic()
        try:
            self._api.post(lease_path(self._grant.token, "heartbeat"), timeout_s=self._answer_s)
        except Refused as refused:
            # Any other refusal may be that of a proxy, or of a server that cannot answer right now.
            if refused.status == 410 or refused.code == "lease_not_found":
                self._lose(str(refused))
            else:
                log.warning("a heartbeat of the GPU lease was refused: %s", refused)
            return False
        except Unavailable as away:
            log.warning("a heartbeat of the GPU lease failed: %s", away)
            return False
        with self._changed:
            self._until = self._grant.trusted_from(sent_at)
            self._changed.notify_all()
        return True

    def _release(self) -> None:
        try:
            self._api.post(lease_path(self._grant.token, "release"), timeout_s=RELEASE_S)
        except OrchestratorError as error:
            log.warning("the GPU lease was not released and ends by itself within %g s: %s", self._grant.ttl_s, error)

    # ── the thread that watches ─────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        _leave_signals_to_others()
        with self._changed:
            while not self._stopping.is_set() and (left_s := self._until - time.monotonic()) > 0:
                self._changed.wait(left_s)
        self._lose(f"no heartbeat was answered in the {self._grant.ttl_s:g} s it lives without one")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._stopping.is_set():
                return
            self._lost = True
            self._stopping.set()
            self._changed.notify_all()
        self._on_lost(reason)


def _leave_signals_to_others() -> None:
    """A signal to the process interrupts the thread that gets it, and that must not be one of ours."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
