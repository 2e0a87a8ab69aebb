"""What a slot runs: one job, or a batch of them in one call. Its clocks, and what becomes of each job."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.jobs import ErrorKind
from orchestrator.leases import Remains
from orchestrator.store.claim import Claim
from orchestrator.store.settle import End, Left, Outcome

#: Longest pause a handler may ask for.
MAX_RETRY_AFTER_S = 31_536_000.0
NEVER = float("inf")

#: The jobs of one call. They agree in type, model and lease, so that any of them speaks for all.
Batch = tuple[Claim, ...]


@dataclass
class Run:
    """`verdicts` say why its process was killed: what its jobs get to hear then, whatever it says meanwhile."""

    claims: Batch
    since: float = field(default_factory=time.monotonic)
    deadline: float = NEVER
    #: When its process gets SIGTERM and SIGKILL, since a job of it was cancelled.
    term_at: float = NEVER
    kill_at: float = NEVER
    cancelled: set[str] = field(default_factory=set)
    verdicts: dict[str, End] = field(default_factory=dict)
    #: It was written down as running.
    noted: bool = False

    def __post_init__(self) -> None:
        self.deadline = self.since + min(claim.max_runtime_sec or NEVER for claim in self.claims)

    @property
    def lead(self) -> Claim:
        return self.claims[0]

    @property
    def batched(self) -> bool:
        return bool(self.lead.batch)

    def cancel(self, job_id: str, step_s: float) -> bool:
        """Whether this is new. The first of them sets the clock for all."""
        if job_id in self.cancelled:
            return False
        self.cancelled.add(job_id)
        if self.term_at == NEVER:
            self.term_at = time.monotonic() + step_s
            self.kill_at = self.term_at + step_s
        return True

    @property
    def unwanted(self) -> bool:
        """Whether all of it was cancelled."""
        return len(self.cancelled) == len(self.claims)

    # ── verdicts ────────────────────────────────────────────────────────────────────────────────────────────────

    def overrun(self) -> None:
        """At the limit of one the others may run again, together with whomever."""
        limit = min(claim.max_runtime_sec or NEVER for claim in self.claims)
        late = [claim for claim in self.claims if claim.max_runtime_sec == limit]
        self.hand_back("a job in its batch ran longer than its max_runtime_sec", but=late)
        error = f"ran longer than max_runtime_sec = {limit}"
        said = {"error_kind": ErrorKind.TIMEOUT, "error": error, "run_seconds": limit}
        self.verdicts |= {claim.job_id: _end(claim, Outcome.FAILED, **said) for claim in late}

    def stop(self) -> None:
        """Those that were cancelled did not stop; their neighbours may run again. One alone ends as it dies."""
        if self.unwanted:
            return
        stopped = [claim for claim in self.claims if claim.job_id in self.cancelled]
        self.hand_back("a job in its batch was cancelled and did not stop", but=stopped)
        said = {"error_kind": ErrorKind.TRANSIENT, "error": "was cancelled and did not stop"}
        self.verdicts |= {claim.job_id: _end(claim, Outcome.CANCELLED, **said) for claim in stopped}

    def hand_back(self, reason: str, but: Collection[Claim] = ()) -> None:
        """They may run elsewhere, and nobody is charged."""
        back = [claim for claim in self.claims if claim not in but]
        self.verdicts |= {claim.job_id: _end(claim, Outcome.HANDED_BACK, error=reason) for claim in back}

    def lose_gpu(self, error: str) -> None:
        said = {"error_kind": ErrorKind.GPU_LOST, "error": error}
        self.verdicts |= {claim.job_id: _end(claim, Outcome.FAILED, **said) for claim in self.claims}

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────

    def ends(self, endings: Sequence[Mapping[str, Any]], results: str) -> list[End]:
        """What the slot said about its jobs, as the store wants to hear it; last of the one whose lease it is."""
        found, at = [], 0
        for claim, ending in zip(self.claims, endings, strict=True):
            size = ending.get("size", len(results))
            found.append(_said(claim, ending, results[at : at + size]))
            at += size
        return _bearer_last(found)

    def ends_of_dead(self, code: int) -> list[End]:
        """The answers to the jobs of a process that is gone."""
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return _bearer_last([self.verdicts.get(one.job_id) or self._crashed(one, how) for one in self.claims])

    def _crashed(self, claim: Claim, how: str) -> End:
        """Of several nobody knows who did it: each runs again, alone, and then it will show."""
        if len(self.claims) == 1:
            error = f"the process that ran it {how}"
            return _end(claim, Outcome.FAILED, error_kind=ErrorKind.WORKER_LOST, error=error)
        error = f"the process that ran its batch of {len(self.claims)} {how}"
        return _end(claim, Outcome.HANDED_BACK, error_kind=ErrorKind.BATCH, error=error)


def _bearer_last(ends: list[End]) -> list[End]:
    """The lease ends with the last of them, and they may be written by more than one transaction."""
    return sorted(ends, key=lambda end: end.left.remains is not Remains.SHARED) if len(ends) > 1 else ends


def _end(claim: Claim, outcome: Outcome, **said: Any) -> End:
    left = Left(Remains.SHARED) if claim.shares else Left()
    of_claim: Any = {
        "lease_key": claim.lease_key,
        "caps": claim.caps,
        "workflow_id": claim.workflow_id,
        "trace_context": claim.trace_context,
    }
    return End(claim.job_id, claim.attempt, outcome, left=left, **of_claim, **said)


def _said(claim: Claim, ending: Mapping[str, Any], result: str) -> End:
    kind = ending.get("error_kind")
    return _end(
        claim,
        Outcome(ending["outcome"]),
        run_seconds=float(ending["run_seconds"]),
        result=result or None,
        error_kind=ErrorKind(kind) if kind else None,
        error=ending.get("error"),
        retry_after_s=_bounded(ending.get("retry_after_s")),
        spawned=int(ending.get("spawned", 0)),
    )


def _bounded(seconds: object) -> float | None:
    """A pause within a year; anything else a handler asks for is left to the usual backoff."""
    return seconds if isinstance(seconds, int | float) and 0 <= seconds <= MAX_RETRY_AFTER_S else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
