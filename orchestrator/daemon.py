"""One orchestrator instance: who is created, in which order, and who is stopped before whom."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from orchestrator.identity import instance_id
from orchestrator.jobs import NewJob, RetryPolicy
from orchestrator.leader.loop import LeaderLoop
from orchestrator.leases import Denied, Granted, LeaseRequest, Terms
from orchestrator.publisher import Publisher
from orchestrator.remote import RemoteWork
from orchestrator.settings import Settings
from orchestrator.store import grants
from orchestrator.store.batcher import Batcher
from orchestrator.store.database import Database
from orchestrator.store.submit import Verdict, submit_jobs
from orchestrator.stream.hub import Hub
from orchestrator.telemetry import metrics


@dataclass(frozen=True)
class Submission:
    """What one request submits: stored together, in one transaction."""

    jobs: tuple[NewJob, ...]


class Orchestrator:
    """Everything behind the HTTP edge. Start it once, close it once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.holder = instance_id()
        self.db = Database(settings)
        self.hub = Hub(settings)
        self.policy = RetryPolicy.of(settings)
        self._terms = Terms.of(settings)
        self.publisher = Publisher(self.db, self.hub, settings)
        self.leader = LeaderLoop(self.db, self.hub, self.publisher, settings, self.holder)
        self._submits: Batcher[Submission, list[Verdict]] = Batcher(
            "submit-batcher", self._store, weight=lambda item: len(item.jobs), flushers=3
        )
        self._leases: Batcher[LeaseRequest, Granted | Denied] = Batcher("lease-batcher", self._grant, max_batch=100)
        self.remote = RemoteWork(self.db, self.publisher, settings, self.policy, self._terms)

    def start(self) -> None:
        self.publisher.start()
        self.leader.start()

    def close(self) -> None:
        """Accept no more, finish what was accepted, resign, disconnect."""
        self._submits.close(self.settings.db_timeout_s)
        self._leases.close(self.settings.db_timeout_s)
        self.remote.close(self.settings.db_timeout_s)
        self.leader.close()
        self.publisher.close()
        self.hub.close()
        self.db.close()

    def submit(self, new_jobs: Sequence[NewJob]) -> Future[list[Verdict]]:
        """Store jobs; the future has a verdict for each once they are committed."""
        return self._submits.submit(Submission(tuple(new_jobs)))

    def lease(self, request: LeaseRequest) -> Future[Granted | Denied]:
        return self._leases.submit(request)

    def _store(self, submissions: list[Submission]) -> list[list[Verdict]]:
        """Flush of the submit batcher: one transaction for all requests that waited, then a nudge per lane."""
        batch = [job for submission in submissions for job in submission.jobs]
        verdicts = submit_jobs(self.db, batch, self.policy)
        created = [job for job, verdict in zip(batch, verdicts, strict=True) if verdict is Verdict.CREATED]
        for lane in {job.spec.pool_id for job in created}:
            self.publisher.nudge(lane)
        for job in created:
            metrics.submitted(job.spec.type)
        answers = iter(verdicts)
        return [[next(answers) for _ in submission.jobs] for submission in submissions]

    def _grant(self, requests: list[LeaseRequest]) -> list[Granted | Denied]:
        answers = grants.grant_to_clients(self.db, requests, self._terms)
        for answer in answers:
            decision = "granted" if isinstance(answer, Granted) else "denied"
            metrics.lease_decided(decision, answer.mode if isinstance(answer, Granted) else answer.code)
        return answers
