"""Jobs whose end was their last: the row says so, the dead-letter stream tells whoever watches it."""

from __future__ import annotations

from orchestrator.jobs import BURY
from orchestrator.store.settle import Settled
from orchestrator.stream.hub import DeadLetter


def dead_letter(item: Settled, entry_id: str = "") -> DeadLetter | None:
    """The letter for a settled attempt; None when its job lives on or ended otherwise."""
    if item.arrow is not BURY:
        return None
    end = item.end
    return DeadLetter(end.job_id, entry_id, item.attempts, end.error or "", str(end.error_kind))
