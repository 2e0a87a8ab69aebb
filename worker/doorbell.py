"""Listens to the control stream, so that a cancel need not wait for the next heartbeat."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from orchestrator.errors import RedisUnavailable
from orchestrator.settings import Settings
from orchestrator.stream.doorbell import Doorbell

log = logging.getLogger(__name__)

#: Seconds between tries while Redis is away; the heartbeats go on meanwhile.
RETRY_EVERY_S = 1.0


class Listener:
    """Calls `rang` soon after somebody rang, from a thread of its own."""

    def __init__(self, bell: Doorbell, settings: Settings, rang: Callable[[], None]) -> None:
        self._bell = bell
        self._settings = settings
        self._rang = rang
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="doorbell", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._bell.ear.release(self._thread, self._settings.redis_timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                if self._bell.listen(self._settings.redis_block_ms):
                    self._rang()
            except RedisUnavailable:
                self._stop.wait(RETRY_EVERY_S)  # whoever reads jobs says that Redis is away
            except Exception:
                log.exception("doorbell broke")
                self._stop.wait(RETRY_EVERY_S)
