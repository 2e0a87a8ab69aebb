"""Jobs claimed ahead, which wait in their worker's hand for the next slot that is free.

While jobs are over within moments most of a worker's time would go into waiting for their claims, slots idle: so it
claims the next ones while the last run, and more of them at once, since a transaction costs nearly the same for many.
That ends with the first job that is not like this, and when they usually take longer; what finds no slot in time is
handed back, uncharged, for others.
"""

from __future__ import annotations

import math
from collections import deque

from worker.process import SlotProcess
from worker.run import Batch

#: Jobs that usually take less than this many seconds are over within moments. Usually: on a busy machine any of them
#: may have to wait for a processor.
BRIEF_S = 0.002
#: How much the last job counts in what is usual.
WEIGHT = 1 / 16
#: So many of them since the last that was not, and the next are expected to be like them.
IN_A_ROW = 64
#: Jobs claimed at once, for each slot that is not busy with something longer.
AHEAD = 4
#: Seconds after which others may have a job that found no slot.
PATIENCE_S = 0.25
#: Since when those wait that nobody shall run.
GIVEN_UP = -math.inf
#: Characters of a payload that a slot takes at once, so that sending it waits for nobody.
SMALL = 16_384


class Hand:
    """Whoever holds it lets one thread at a time in."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Batch]] = deque()
        self._in_a_row = 0
        #: Moving average of how long jobs run.
        self._usual_s = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def brief(self) -> bool:
        """Whether jobs usually end within moments."""
        return self._usual_s < BRIEF_S

    @property
    def open(self) -> bool:
        """Whether jobs are so brief that more may be claimed than slots are free."""
        return self.brief and self._in_a_row >= IN_A_ROW

    def saw(self, run_s: float) -> None:
        """A job ended that ran so long."""
        self._usual_s += (run_s - self._usual_s) * WEIGHT
        self._in_a_row += 1

    def saw_other(self) -> None:
        """A job came that is not like this: it runs for longer than a moment, or others like it cannot wait here."""
        self._in_a_row = 0

    def keep(self, batch: Batch, now: float) -> bool:
        """False when it cannot wait here: a job under a warm model's lease has its own slot, a large one is slow."""
        lease = batch[0].lease
        if (lease and lease.resident) or not is_small(batch):
            return False
        self._kept.append((now, batch))
        return True

    def next_for(self, slot: SlotProcess) -> Batch | None:
        """The oldest that this slot may run: whoever has a GPU of its own needs one that keeps nothing there."""
        for place, (since, batch) in enumerate(self._kept):
            if since > GIVEN_UP and (slot.resident is None or not batch[0].gpus):
                del self._kept[place]
                return batch
        return None

    def give_up(self, job: tuple[str, int] | None = None) -> None:
        """This attempt shall not run here, or none of them: `overdue` has them next."""
        for place, (_, batch) in enumerate(self._kept):
            if job is None or any((claim.job_id, claim.attempt) == job for claim in batch):
                self._kept[place] = (GIVEN_UP, batch)

    def overdue(self, now: float) -> list[Batch]:
        """Those that waited long enough, which leave."""
        late = [batch for since, batch in self._kept if now - since > PATIENCE_S]
        if late:
            self._kept = deque(kept for kept in self._kept if now - kept[0] <= PATIENCE_S)
            self.saw_other()
        return late


def is_small(batch: Batch) -> bool:
    return sum(len(claim.payload) for claim in batch) <= SMALL


def is_plain(batch: Batch) -> bool:
    """Whether others like it may be claimed ahead."""
    return not (batch[0].lease or batch[0].batch) and is_small(batch)
