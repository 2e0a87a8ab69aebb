"""The work of HTTP workers: claims and reports of many of them, each kind a group commit of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from orchestrator.errors import JobCancelled, OrchestratorError, Unavailable
from orchestrator.jobs import STOP, RetryPolicy, Status
from orchestrator.leases import Terms
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import reports, unclaimable
from orchestrator.store.batcher import Batcher
from orchestrator.store.caps import Seats
from orchestrator.store.claim import Claim
from orchestrator.store.database import Database, Waiting
from orchestrator.store.dispatch import Claiming, Fetch
from orchestrator.store.moves import Claimant
from orchestrator.store.policies import Copy
from orchestrator.store.registry import Fetcher
from orchestrator.store.reports import Ended, Heard, Report
from orchestrator.store.settle import End, never_started
from orchestrator.telemetry import life, tracing

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Characters of a result that weigh as much as a report without one: 500 results of a megabyte are too much at once.
BULKY = 65_536


def _weight(report: Report) -> int:
    result = report.event.result if isinstance(report.event, End) else None
    return 1 + len(result or "") // BULKY


def _about(report: Report) -> dict[str, object]:
    event = report.event
    return {"job_id": event.job_id, "attempt": event.attempt, "worker_id": report.worker_id}


class RemoteWork:
    """Hands jobs to HTTP workers and writes down what they report."""

    def __init__(
        self,
        db: Database,
        publisher: Publisher,
        settings: Settings,
        policy: RetryPolicy,
        terms: Terms,
        policies: Copy,
    ) -> None:
        self._db = db
        self._publisher = publisher
        self._settings = settings
        self._policy = policy
        self._terms = terms
        self._policies = policies
        self._claims: Batcher[Fetch, list[Claim]] = Batcher(
            "claim-batcher",
            self._claim,
            apart=self._claim,
            weight=lambda fetch: fetch.most,
        )
        self._reports: Batcher[Report, Ended | Heard] = Batcher(
            "report-batcher", self._write, apart=self._write, weight=_weight, about=_about
        )

    def claim(self, fetch: Fetch) -> Future[list[Claim]]:
        return self._claims.submit(fetch)

    def report(self, report: Report) -> Future[Ended | Heard]:
        return self._reports.submit(report)

    def hand_back(self, worker_id: str, claims: Sequence[Claim]) -> None:
        """Their worker never heard of these: it went away before the answer reached it."""
        for claim in claims:
            end = never_started(claim.job_id, claim.attempt, "the answer to its claim was lost")
            self._reports.post(Report(worker_id, end))

    def close(self, timeout_s: float) -> None:
        """Claims first: those whose callers are gone are handed back by a report."""
        self._claims.close(timeout_s)
        self._reports.close(timeout_s)

    def _claim(self, fetches: list[Fetch], waiting: Waiting = Waiting.ONCE) -> list[list[Claim] | OrchestratorError]:
        claiming, since = Claiming(fetches, self._claimant, self._policies.book), tracing.moment()
        try:
            answers = self._db.write_batch(claiming, waiting)
        except OrchestratorError:
            raise
        except Exception as error:
            if len(fetches) > 1 or not claiming.tried:
                raise  # the batcher finds the one at fault
            answers = [self._claim_apart(fetches[0], claiming, error)]
        self._nudge(claiming.freed)
        if spans := tracing.spans():
            for fetch, claims in zip(fetches, answers, strict=True):
                if not isinstance(claims, OrchestratorError):
                    spans.claimed(claims, since, tracing.moment(), fetch.worker_id)
        return answers

    def _claim_apart(self, fetch: Fetch, claiming: Claiming, error: Exception) -> list[Claim]:
        """What one worker may have of the jobs that it was offered, when one of them broke the claim of all."""

        def claim(job_ids: Sequence[str]) -> dict[str, Claim | None]:
            part = claiming.part(job_ids)
            with suppress(Unavailable):  # what was claimed before must reach its worker; these wait as they did
                (answer,) = self._db.write_batch(part, Waiting.NOT)
                self._nudge(part.freed)
                return {} if isinstance(answer, OrchestratorError) else {one.job_id: one for one in answer}
            return {}

        def leave(job_id: str, error: Exception) -> None:
            with suppress(Unavailable):
                _, settled = unclaimable.put_off(self._db, claiming.by[fetch.worker_id], job_id, error, self._policy)
                life.settled(settled, worker_id=fetch.worker_id)

        answers = unclaimable.claim_apart(claiming.tried, claim, leave, error)
        return [one for job_id in claiming.tried if (one := answers.get(job_id)) is not None]

    def _claimant(self, fetcher: Fetcher) -> Claimant:
        return fetcher.as_claimant(lease_ttl_s=self._settings.job_lease_ttl_s, terms=self._terms)

    def _write(self, batch: list[Report], waiting: Waiting = Waiting.ONCE) -> list[Ended | Heard | OrchestratorError]:
        since = tracing.moment()
        answers, freed = self._db.write_batch(lambda conn: self._record(conn, batch), waiting)
        again = [answer for answer in answers if isinstance(answer, Ended) and answer.status is Status.PENDING]
        self._nudge(freed | {answer.lane for answer in again})
        _tell(batch, answers)
        if spans := tracing.spans():
            told = [
                (report, answer) for report, answer in zip(batch, answers, strict=True) if isinstance(answer, Ended)
            ]
            for report, answer in told:
                if isinstance(report.event, End):
                    spans.settled([(report.event, answer.status)], since, report.worker_id)
        return answers

    def _record(self, conn: Connection, batch: list[Report]) -> tuple[list[reports.Answer], set[str]]:
        seats = Seats(conn, self._policies.book(conn))
        return reports.write(conn, batch, self._policy, seats), seats.freed

    def _nudge(self, lanes: Collection[str]) -> None:
        for lane in lanes:
            self._publisher.nudge(lane)


def _tell(batch: Sequence[Report], answers: Sequence[reports.Answer]) -> None:
    """The lines about jobs that ended."""
    for report, answer in zip(batch, answers, strict=True):
        if not isinstance(report.event, End):
            continue
        if isinstance(answer, Ended):
            life.ended(answer.arrow, report.event, worker_id=report.worker_id, pool_id=answer.lane)
        elif isinstance(answer, JobCancelled):
            life.ended(STOP, report.event, worker_id=report.worker_id, pool_id=None)
