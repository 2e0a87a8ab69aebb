"""What a worker tells of itself with each heartbeat."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from orchestrator import batch_sizes
from orchestrator.batch_sizes import BatchSizes, Sizes
from orchestrator.jobs import BURY, FAIL, FINISH, RETRY, SKIP
from orchestrator.store.claim import Claim
from orchestrator.store.nodes import Beat
from orchestrator.store.settle import Settled
from worker.preload import Preloader
from worker.run import Batch
from worker.slots import SlotPool


class Standing:
    """How far its jobs are, how many ended and how, how large its batches were, how long its model took to load."""

    def __init__(self) -> None:
        self._progress: dict[str, tuple[int, float, str]] = {}
        self._done = 0
        self._failed = 0
        self._batch_sizes: BatchSizes = {}
        self._load_s: float | None = None

    def progressed(self, claim: Claim, fraction: float, note: str) -> None:
        """What a handler says must not be able to stop the heartbeat that carries it."""
        if math.isfinite(fraction):
            text = str(note).encode(errors="replace").decode()
            self._progress[claim.job_id] = (claim.attempt, min(max(float(fraction), 0.0), 1.0), text)

    def ran(self, batch: Batch) -> None:
        claim = batch[0]
        if claim.batch:
            self._batch_sizes.setdefault(claim.type, Sizes()).count(len(batch))

    def ended(self, job_id: str) -> None:
        self._progress.pop(job_id, None)

    def settled(self, settled: Sequence[Settled]) -> None:
        self._done += sum(item.arrow in (FINISH, SKIP) for item in settled)
        self._failed += sum(item.arrow in (FAIL, BURY, RETRY) for item in settled)

    def loaded(self, seconds: float) -> None:
        self._load_s = seconds if self._load_s is None else (self._load_s + seconds) / 2

    def beat(
        self,
        slots: SlotPool,
        preloader: Preloader | None,
        held: Collection[str],
        *,
        intake_trouble: str | None,
        draining: bool,
    ) -> Beat:
        return Beat(
            busy=slots.busy(),
            done=self._done,
            failed=self._failed,
            draining=draining,
            progress=tuple((job_id, *report) for job_id, report in list(self._progress.items())),
            held=tuple(held),
            resident=slots.resident(),
            slots=slots.count,
            ready=slots.usable(),
            trouble=slots.late or (preloader and preloader.trouble) or slots.trouble or intake_trouble,
            blocked=preloader is not None and preloader.blocked,
            load_seconds=self._load_s,
            batch_sizes=batch_sizes.to_text(self._batch_sizes),
        )
