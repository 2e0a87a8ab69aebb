"""Says that all workers of this process live, from one thread that no handler can block, in one transaction a beat.

That transaction waits for nobody's row: whoever holds one keeps its worker silent, and no other. What can wait comes
after it: how far jobs are, and the sample of the node's GPUs. It hears what became of their jobs and models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from orchestrator.errors import DatabaseUnavailable, GpuUnavailable, OrchestratorError, Unavailable, WorkerLost
from orchestrator.gpu import Gpu
from orchestrator.gpu.watch import Watch
from orchestrator.settings import Settings
from orchestrator.store import inventory, nodes, withdraw
from orchestrator.store.database import Database, RowsHeld
from orchestrator.store.gpus import Gate
from orchestrator.store.inventory import Findings
from orchestrator.store.nodes import Beat, Heard
from worker.lifeline import Lifeline

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Pulse:
    """One worker's part in the heartbeats: what it says, and whom to tell what came of it.

    `on_lost` is called once, when the leader gave this worker's jobs away. `on_cancelled` gets jobs (with attempts)
    that somebody cancelled, again with every heartbeat until they have ended. `on_sampled` gets each sample of the
    node's GPUs and what it led to. Jobs and leases of neighbours may be among them.
    """

    worker_id: str
    beat: Callable[[], Beat]
    #: The marks of its slots that live.
    running: Callable[[], Collection[str]]
    lifeline: Lifeline
    on_lost: Callable[[], None]
    on_cancelled: Callable[[Sequence[tuple[str, int]]], None]
    on_sampled: Callable[[list[Gpu], Findings], None]
    #: Its first heartbeat.
    first: Future[None] = field(default_factory=Future)
    #: What the database knows.
    said: Beat | None = None
    gone: bool = False
    #: Held while it is told something: who left is told nothing more.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        if not self.first.done():
            self.first.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.first.done():
            self.first.set_exception(error)


class _Outcome(NamedTuple):
    heard: Heard
    cancelled: list[tuple[str, int]]


class Keepalive:
    """Beats until stopped, and sooner when poked. `on_found` gets what concerns the node rather than one worker."""

    def __init__(
        self,
        db: Database,
        node_id: str,
        gpus: Watch,
        settings: Settings,
        on_found: Callable[[Findings], None] = lambda _findings: None,
    ) -> None:
        self._db = db
        self._node_id = node_id
        self._gpus = gpus
        self._settings = settings
        self._on_found = on_found
        self._gate = Gate.of(settings)
        self._lock = threading.Lock()
        self._pulses: list[Pulse] = []
        self._stop = threading.Event()
        self._poked = threading.Event()
        #: Seconds for which a transaction is tried again: the next beat comes after it.
        self._patience_s = settings.worker_heartbeat_s / 2
        self._interval_s = min(settings.worker_heartbeat_s, settings.gpu_sample_s)
        self._thread = threading.Thread(target=self._loop, name="keepalive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, pulse: Pulse) -> None:
        """Beat for this worker too; returns after its first heartbeat. Raises WorkerLost or DatabaseUnavailable."""
        with self._lock:
            self._pulses.append(pulse)
        self.poke()
        pulse.first.result()

    def leave(self, pulse: Pulse) -> None:
        """Say nothing more of this worker, and tell it nothing."""
        with self._lock:
            self._pulses = [other for other in self._pulses if other is not pulse]
        with pulse.lock:
            pulse.gone = True

    def poke(self) -> None:
        """Something changed: beat now."""
        self._poked.set()

    def close(self) -> None:
        self._stop.set()
        self._poked.set()
        if self._thread.is_alive():
            self._thread.join(self._settings.db_timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._poked.wait(self._interval_s)
            self._poked.clear()
            if self._stop.is_set():
                return
            try:
                self.beat()
            except Exception:
                log.exception("heartbeats broke")

    def beat(self) -> None:
        """One heartbeat of everybody."""
        started = time.monotonic()
        with self._lock:
            pulses = list(self._pulses)
        # Slots first: one that ended before the sample was taken cannot hold what the sample shows.
        said = {pulse: answer for pulse in pulses if (answer := _ask(pulse)) is not None}
        running = frozenset(mark for _, marks in said.values() for mark in marks)
        heard = self._say({pulse: beat for pulse, (beat, _) in said.items()}, started) if said else {}
        if heard:
            self._note_progress(heard)
            self._take_stock(heard, running)
        for pulse in heard:
            _tell(pulse, pulse.begin)

    def _sample(self) -> list[Gpu]:
        """The GPUs now; those known before, marked as unknown, when the driver does not answer."""
        try:
            return self._gpus.sample()
        except GpuUnavailable as silent:
            log.warning("GPUs not sampled", extra={"error": str(silent)})
            return self._gpus.last_known(str(silent))

    def _say(self, beats: dict[Pulse, Beat], started: float, *, whole: bool = True) -> dict[Pulse, Beat]:
        """Together; when that cannot be written, in halves, so that only those at fault miss their heartbeat.

        Those of whom it was written that they live. Whoever holds what cannot be left out (an index's entry) is waited
        for once, by all of them; halves do not wait.
        """
        try:
            outcome = self._write(lambda conn: self._live(conn, beats), whole=whole)
        except Exception as error:
            for pulse in beats:
                pulse.said = None  # who knows what was committed
            if len(beats) > 1 and (isinstance(error, RowsHeld) or not isinstance(error, Unavailable)):
                first, second = _halves(beats)
                return self._say(first, started, whole=False) | self._say(second, started, whole=False)
            if isinstance(error, OrchestratorError):
                worker_id = next(iter(beats)).worker_id if len(beats) == 1 else None
                log.warning("heartbeat failed", extra={"worker_id": worker_id, "error": str(error)})
            else:
                log.exception("heartbeat broke", extra={"worker_id": next(iter(beats)).worker_id})
            for pulse in beats:
                pulse.fail(error)
            return {}
        return {pulse: beat for pulse, beat in beats.items() if self._was_heard(pulse, beat, started, outcome)}

    def _write(self, work: Callable[[Connection], T], *, whole: bool) -> T:
        return self._db.write(work, self._patience_s) if whole else self._db.write_at_once(work)

    def _live(self, conn: Connection, beats: dict[Pulse, Beat]) -> _Outcome:
        said = {pulse.worker_id: pulse.said for pulse in beats if pulse.said is not None}
        named = {pulse.worker_id: beat for pulse, beat in beats.items()}
        heard = nodes.heartbeats(conn, self._node_id, named, said, self._settings.worker_heartbeat_s)
        held = [job_id for name, beat in named.items() if name not in heard.lost for job_id in beat.held]
        return _Outcome(heard, withdraw.to_stop(conn, named, held))

    def _was_heard(self, pulse: Pulse, beat: Beat, started: float, outcome: _Outcome) -> bool:
        heard, name = outcome.heard, pulse.worker_id
        if name in heard.lost:
            _tell(pulse, lambda: self._give_up(pulse))
            return False
        if name in heard.missed:
            held = DatabaseUnavailable(f"somebody holds the row of worker {name}")
            log.warning("heartbeat failed", extra={"worker_id": name, "error": str(held)})
            pulse.fail(held)
            return False
        pulse.said = beat
        _tell(pulse, lambda: pulse.lifeline.vouch(started + self._settings.worker_timeout_s))
        if name in heard.unrenewed:
            log.warning("leases not extended, somebody holds the row of one", extra={"worker_id": name})
        else:
            _tell(pulse, lambda: self._extend(pulse, started))
        if outcome.cancelled:
            _tell(pulse, lambda: pulse.on_cancelled(outcome.cancelled))
        return True

    def _extend(self, pulse: Pulse, started: float) -> None:
        beat_s = self._settings.worker_heartbeat_s
        pulse.lifeline.extend(started + self._settings.job_lease_ttl_s - beat_s, grace_s=beat_s / 4)

    def _note_progress(self, heard: dict[Pulse, Beat]) -> None:
        reports = {pulse.worker_id: beat for pulse, beat in heard.items() if beat.progress}
        if reports:
            self._try("progress", lambda conn: nodes.note_progress(conn, reports))

    def _take_stock(self, heard: dict[Pulse, Beat], running: frozenset[str]) -> None:
        taken_at = time.monotonic()
        sample = self._sample()
        if not sample:
            return

        def work(conn: Connection) -> Findings:
            return inventory.take_stock(
                conn,
                self._node_id,
                [pulse.worker_id for pulse in heard],
                sample,
                self._gate,
                running,
                self._settings.gpu_release_s,
                resident=[key for beat in heard.values() for key in beat.resident],
                taken_at=taken_at,
            )

        findings = self._try("GPUs", work)
        if findings is not None:
            for pulse in heard:
                _tell(pulse, partial(pulse.on_sampled, sample, findings))
            self._on_found(findings)

    def _try(self, what: str, work: Callable[[Connection], T]) -> T | None:
        """Write what may miss a beat: nobody is given up for it, and no beat waits for a second try."""
        try:
            return self._db.write(work, self._patience_s)
        except OrchestratorError as error:
            log.warning("not written", extra={"item": what, "error": str(error)})
        except Exception:
            log.exception("not written", extra={"item": what})
        return None

    def _give_up(self, pulse: Pulse) -> None:
        pulse.gone = True
        with self._lock:
            self._pulses = [other for other in self._pulses if other is not pulse]
        lost = WorkerLost(pulse.worker_id)
        log.error("declared dead", extra={"worker_id": pulse.worker_id, "error": str(lost)})
        if pulse.first.done():
            pulse.on_lost()
        pulse.fail(lost)


def _ask(pulse: Pulse) -> tuple[Beat, Collection[str]] | None:
    """A worker that cannot say how it is must not silence the others."""
    try:
        return pulse.beat(), pulse.running()
    except Exception as error:
        log.exception("heartbeat broke", extra={"worker_id": pulse.worker_id})
        pulse.fail(error)
        return None


def _tell(pulse: Pulse, news: Callable[[], None]) -> None:
    with pulse.lock:
        if pulse.gone:
            return  # its session did not wait any longer for this: there is nobody left to tell
        try:
            news()
        except Exception:
            log.exception("heartbeat broke", extra={"worker_id": pulse.worker_id})


def _halves(beats: dict[Pulse, Beat]) -> tuple[dict[Pulse, Beat], dict[Pulse, Beat]]:
    items = list(beats.items())
    middle = len(items) // 2
    return dict(items[:middle]), dict(items[middle:])
