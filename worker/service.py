"""Keeps a post manned: sessions one after the other, until it is told to leave.

A session that the leader declared dead is followed by a new one under a new id; one whose servers are away is tried
again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from orchestrator.errors import OrchestratorError
from worker.post import Post
from worker.session import Session

log = logging.getLogger(__name__)

#: Seconds between tries to begin a session while a server is away.
RETRY_EVERY_S = 1.0


class Service:
    """One thread per post. `over` is set when its last session is gone."""

    def __init__(self, post: Post, new_session: Callable[[Post], Session]) -> None:
        self.post = post
        self._new_session = new_session
        self._leaving = threading.Event()
        self._grace_s = 0.0
        #: Held while the session changes, so that what is said meanwhile reaches the old one or the new one.
        self._lock = threading.Lock()
        self._session: Session | None = None
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"post-{post.pool_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def leaving(self) -> bool:
        return self._leaving.is_set()

    @property
    def types(self) -> tuple[str, ...]:
        """What its slots have handlers for; none before the first of them is up."""
        return self._session.types if self._session else ()

    @property
    def warm(self) -> bool:
        """Whether it takes jobs, or only lacks memory that others may hold for its sake."""
        return self._session is not None and (self._session.usable or self._session.blocked)

    @property
    def load(self) -> tuple[int, int]:
        """Slots in use, and all of them."""
        return self._session.load if self._session else (0, 0)

    def resize(self, slots: int) -> None:
        with self._lock:
            self.post = self.post._replace(slots=slots)
            if self._session is not None:
                self._session.resize(slots)

    def leave(self, grace_s: float) -> None:
        """Take no more jobs; those that run may end within `grace_s`. Said again, that time counts from now."""
        with self._lock:
            self._grace_s = grace_s
            self._leaving.set()
            if self._session is not None:
                self._session.leave(grace_s)

    def join(self, timeout_s: float | None = None) -> bool:
        return self.over.wait(timeout_s)

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                self._one_session()
        except Exception:
            log.exception("post broke", extra={"pool_id": self.post.pool_id})
        finally:
            self.over.set()  # whoever started it may start another

    def _one_session(self) -> None:
        session = self._next_session()
        about = {"worker_id": session.worker_id, "pool_id": self.post.pool_id}
        try:
            session.begin()
            while not (session.over.wait(1.0) or self._leaving.is_set()):
                pass
            if not session.lost:
                session.leave(self._grace_s)
                session.end()
                return
        except OrchestratorError as away:  # its servers are away, or it was declared dead before its first heartbeat
            log.warning("worker waits for its servers", extra={"error": str(away)} | about)
        except Exception:
            log.exception("session broke", extra=about)
        session.abandon()
        if not session.lost:
            self._leaving.wait(RETRY_EVERY_S)

    def _next_session(self) -> Session:
        post = self.post
        session = self._new_session(post)
        with self._lock:
            self._session = session
            if self.post.slots != post.slots:
                session.resize(self.post.slots)
            if self._leaving.is_set():
                session.leave(self._grace_s)
        return session
