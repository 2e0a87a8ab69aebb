"""A term of leadership, and the candidate that wins, keeps and loses it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator import actors
from orchestrator.errors import OrchestratorError, StaleEpoch
from orchestrator.settings import Settings
from orchestrator.store import leadership
from orchestrator.store.database import Database, Waiting
from orchestrator.store.dialect import LeaderLock
from orchestrator.store.hot import Hot

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Term:
    """Leadership under one epoch. Its writes are refused as soon as another epoch leads."""

    db: Database
    lock_name: str
    epoch: int
    #: In whose name it writes.
    actor: str
    #: When it began, on this process's monotonic clock.
    began: float = float("-inf")

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began

    def write(self, work: Callable[[Connection], T], waiting: Waiting = Waiting.ONCE) -> T:
        """Run `work` in a transaction that begins with the fence. Raises StaleEpoch; nothing is written then.

        A row that somebody holds is waited for once at most: all other duties wait meanwhile.
        """

        def fenced(conn: Connection) -> T:
            leadership.fence(conn, self.lock_name, self.epoch)
            return work(conn)

        with actors.acting(self.actor):
            return self.db.write_batch(fenced, waiting)

    def finds(self, asked: Hot, **given: Any) -> bool:
        """Whether there is anything to do: mostly there is not, and no transaction need begin. Raises StaleEpoch."""
        return self.db.read(lambda conn: leadership.finds(conn, asked, self.lock_name, self.epoch, **given))


class Candidate:
    """Stands for election and keeps what it wins. One thread calls it, save where a method says otherwise."""

    def __init__(self, db: Database, settings: Settings, holder: str) -> None:
        self._db = db
        self._settings = settings
        self.holder = holder
        self._lock: LeaderLock | None = None
        self._row_seen = self._lock_known = False
        self._term: Term | None = None
        self._trusted_until = float("-inf")
        #: The highest epoch that ever refused one of ours.
        self._surpass = 0

    @property
    def term(self) -> Term | None:
        """The term, while it may be trusted; safe to ask from other threads."""
        return self._term if time.monotonic() < self._trusted_until else None

    def tick(self) -> None:
        """Win, renew or give up a term; never raises for a server that is away."""
        try:
            if self._term is None:
                self._stand()
            else:
                self._keep(self._term)
        except OrchestratorError as doubt:
            self._step_down(str(doubt))
        except Exception:
            # Perhaps the row itself is gone: somebody deleted it, or restored a database without it.
            self._step_down("the election broke")
            self._row_seen = False
            raise

    def refused_by(self, epoch: int) -> None:
        """Redis knows this epoch as newer than ours; safe to call from other threads.

        Either a successor is at work, and our next renewal fails. Or the database forgot terms (a row set back by
        hand, a failover to a replica that lagged): then nobody could lead until that many terms have passed, so we
        begin one above it.
        """
        self._surpass = max(self._surpass, epoch)

    def resign(self) -> None:
        """Leave in order, so that a successor need not wait."""
        term, self._term = self._term, None
        if term is not None:
            try:
                self._db.write(lambda conn: leadership.resign(conn, term.lock_name, term.epoch, self.holder))
            except OrchestratorError as away:
                log.warning("could not resign", extra={"epoch": term.epoch, "error": str(away)})
            else:
                log.info("resigned", extra={"epoch": term.epoch})
        self._drop_lock()

    def _stand(self) -> None:
        name = self._settings.leader_lock
        if not self._row_seen:
            leadership.ensure_row(self._db, name)
            self._row_seen = True
        if not self._lock_known:
            self._lock = self._db.leader_lock()
            self._lock_known = True
        started = time.monotonic()
        if self._lock is not None and not (self._lock.held() or self._lock.acquire()):
            return
        ttl, lock_held = self._settings.leader_ttl_s, self._lock is not None
        above = self._surpass
        epoch = self._db.write(
            lambda conn: leadership.take(conn, name, self.holder, ttl, lock_held=lock_held, above=above)
        )
        if epoch is not None:
            self._term = Term(self._db, name, epoch, actors.of_leader(self.holder), began=time.monotonic())
            self._trust_from(started)
            log.info("leading", extra={"epoch": epoch})

    def _keep(self, term: Term) -> None:
        started = time.monotonic()
        if started >= self._trusted_until:
            raise StaleEpoch(term.epoch)
        if self._lock is not None and not self._lock.held():
            raise StaleEpoch(term.epoch)
        ttl = self._settings.leader_ttl_s
        self._db.write(lambda conn: leadership.renew(conn, term.lock_name, term.epoch, ttl))
        self._trust_from(started)
        if self._surpass > term.epoch:
            log.warning("a higher epoch was forgotten", extra={"epoch": term.epoch, "higher": self._surpass})
            self.resign()

    def _trust_from(self, started: float) -> None:
        self._trusted_until = started + self._settings.leader_ttl_s - self._settings.leader_trust_margin_s

    def _step_down(self, reason: str) -> None:
        if self._term is not None:
            log.warning("stepped down", extra={"epoch": self._term.epoch, "reason": reason})
        self._term = None
        self._trusted_until = float("-inf")
        self._drop_lock()

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()


def borrow(db: Database, settings: Settings, holder: str) -> Term:
    """A term for one run of a duty by hand: the living leader's epoch, or a short one of our own.

    What it writes is done by whoever acts here.
    """
    actor = actors.current() or actors.of_leader(holder)
    leadership.ensure_row(db, settings.leader_lock)
    now = db.read(lambda conn: leadership.current(conn, settings.leader_lock))
    if now.alive:
        # As old as the leader's: what a young one leaves alone is not for us either.
        return Term(db, settings.leader_lock, now.epoch, actor, began=time.monotonic() - now.age_s)
    epoch = db.write(
        lambda conn: leadership.take(conn, settings.leader_lock, holder, settings.leader_ttl_s, lock_held=False)
    )
    return borrow(db, settings, holder) if epoch is None else Term(db, settings.leader_lock, epoch, actor)
