"""Loads a pool's model into its slots before their first job: a residency lease, a look at the GPU, then `load`.

A slot whose lease is denied waits, and says why; asking for it makes idle models of others leave. A slot that was
evicted for somebody else's need is not loaded again before a job needs it, or the two would take turns for ever.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from orchestrator.errors import GpuUnavailable, OrchestratorError
from orchestrator.gpu.watch import Watch
from orchestrator.leases import Denied, Granted, LeaseRequest, Remains, ResidentSlot, model_lease_key
from orchestrator.store import grants
from orchestrator.store.database import Database
from orchestrator.store.moves import Claimant
from orchestrator.store.settle import Left, Release
from orchestrator.telemetry import logs
from worker.post import Model
from worker.roster import Roster

log = logging.getLogger(__name__)

#: Seconds between two tries to get a lease, at most.
RETRY_S = 1.0


class Preloader:
    """One thread; slots are loaded one after the other as they come up, each in its own process."""

    def __init__(
        self,
        db: Database,
        by: Claimant,
        model: Model,
        watch: Watch,
        slots: Roster,
        note: Callable[[Release], None],
    ) -> None:
        self._db = db
        self._by = by
        self._model = model
        self._watch = watch
        self._slots = slots
        self._note = note
        self._marks: queue.Queue[str | None] = queue.Queue()
        self._stop = threading.Event()
        #: Why the last slot could not be loaded; None when nothing is wrong. And whether it only lacks memory.
        self.trouble: str | None = None
        self.blocked = False
        self._thread = logs.thread(self._loop, "preload")

    def start(self) -> None:
        """Its worker is registered: leases can be had."""
        self._thread.start()

    def add(self, mark: str) -> None:
        """This slot is up and has loaded nothing yet."""
        self._marks.put(mark)

    def loaded(self, model: ResidentSlot | None) -> None:
        self.trouble = None
        if model is not None:
            self._note(Release(model.key, Left(Remains.LOADED)))

    def failed(self, error: str) -> None:
        self.trouble = error
        log.error("model does not load", extra={"job_type": self._model.type, "error": error[:500]})

    def close(self) -> None:
        self._stop.set()
        self._marks.put(None)
        if self._thread.is_alive():
            self._thread.join(5 * RETRY_S)

    def _loop(self) -> None:
        while (mark := self._marks.get()) is not None and not self._stop.is_set():
            while not self._stop.is_set() and self._slots.awaits_load(mark) and not self._load(mark):
                self._stop.wait(RETRY_S)
            self.blocked = False

    def _load(self, mark: str) -> bool:
        """Whether that slot needs no further try."""
        need = self._slots.memory_for(self._model.type) if self._model.memory_mb is None else self._model.memory_mb
        try:
            return self._load_leased(mark, need) if need else self._slots.load(mark, None)
        except OrchestratorError as away:
            self.trouble = str(away)
        except Exception as bug:
            log.exception("preload broke")
            self.trouble = repr(bug)
        return False

    def _load_leased(self, mark: str, need: int) -> bool:
        request = LeaseRequest(
            agent=self._by.pool_id,
            memory_mb=need,
            ttl_s=self._by.lease_ttl_s,
            gpu_count=self._model.gpu_count,
            node_id=self._by.node_id,
            worker_id=self._by.worker_id,
            model_id=self._model.model_id,
            model_key=model_lease_key(mark),
            slot=mark,
            job_type=self._model.type,
            pinned=self._model.type in self._slots.pinned,
        )
        answer = grants.grant_model(self._db, request, self._by.terms)
        if isinstance(answer, Denied):
            self.trouble, self.blocked = answer.reason, True
            return False
        if short := self._not_there(answer, need):
            self.trouble, self.blocked = short, True
            self._note(Release(answer.key, Left(Remains.NOTHING)))
            return False
        self.blocked = False
        model = ResidentSlot(answer.key, self._model.type, self._model.model_id, need, answer.gpus)
        if not self._slots.load(mark, model):
            self._note(Release(answer.key, Left(Remains.NOTHING)))
        return True

    def _not_there(self, lease: Granted, need: int) -> str | None:
        """What the database knows is a second old: others may have taken the memory just now."""
        try:
            free = self._watch.free_mb([gpu.gpu_uuid for gpu in lease.gpus])
        except GpuUnavailable as unknown:
            return str(unknown)
        short = [
            f"GPU {gpu.gpu_index} has {free[gpu.gpu_uuid]} MB free" for gpu in lease.gpus if free[gpu.gpu_uuid] < need
        ]
        return f"needs {need} MB, but {', '.join(short)}" if short else None
