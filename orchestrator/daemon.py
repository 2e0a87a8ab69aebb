"""One orchestrator instance: who is created, in which order, and who is stopped before whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from orchestrator.heartbeats import Heartbeats
from orchestrator.identity import instance_id
from orchestrator.ingest import Ingest
from orchestrator.jobs import NewJob, RetryPolicy
from orchestrator.leader.loop import LeaderLoop
from orchestrator.leases import Denied, Granted, LeaseRequest, Terms
from orchestrator.publisher import Publisher
from orchestrator.remote import RemoteWork
from orchestrator.settings import Settings
from orchestrator.store import grants
from orchestrator.store.admission import Admission
from orchestrator.store.batcher import Batcher
from orchestrator.store.database import Database, Waiting
from orchestrator.store.policies import Copy
from orchestrator.store.submit import Answer, Verdict, submit_jobs
from orchestrator.stream.hub import Hub
from orchestrator.telemetry import metrics, tracing


@dataclass(frozen=True)
class Submission:
    """What one request submits: stored together, in one transaction."""

    jobs: tuple[NewJob, ...]


class Orchestrator:
    """Everything behind the HTTP edge. Start it once, close it once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.holder = instance_id()
        self.db = Database(settings, silence_s=settings.heartbeat_limit_s)
        self.policies = Copy()
        self.hub = Hub(settings)
        self.retry_policy = RetryPolicy.of(settings)
        self.terms = Terms.of(settings)
        self.admission = Admission(self.policies)
        self.publisher = Publisher(self.db, self.hub, settings, self.policies)
        self.leader = LeaderLoop(self.db, self.hub, self.publisher, settings, self.holder)
        self._submits: Batcher[Submission, list[Answer]] = Batcher(
            "submit-batcher",
            self._store,
            apart=self._store,
            weight=lambda item: len(item.jobs),
            flushers=3,
            alone=lambda: self.admission.holds_buckets,
        )
        self._leases: Batcher[LeaseRequest, Granted | Denied] = Batcher(
            "lease-batcher", self._grant, apart=self._grant, max_batch=100
        )
        self.heartbeats = Heartbeats(self.db)
        self.remote = RemoteWork(self.db, self.publisher, settings, self.retry_policy, self.terms, self.policies)
        self._ingest = Ingest(self.db, self.hub, settings, self.policies, self.submit, self.holder)
        self._stop_tracing: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._stop_tracing = tracing.start(self.settings, "gpuorch-serve")
        self.publisher.start()
        self.leader.start()
        self._ingest.start()

    def close(self) -> None:
        """Accept no more, finish what was accepted, resign, disconnect."""
        self._ingest.stop()
        self.leader.stop()  # where Redis lets nobody interrupt them, nobody waits for one listener after the other
        self._ingest.close()
        self._submits.close(self.settings.db_timeout_s)
        self._leases.close(self.settings.db_timeout_s)
        self.heartbeats.close(self.settings.db_timeout_s)
        self.remote.close(self.settings.db_timeout_s)
        self.leader.close()
        self.publisher.close()
        self.hub.close()
        self.db.close()
        self._stop_tracing()

    def submit(self, new_jobs: Sequence[NewJob]) -> Future[list[Answer]]:
        """Store jobs; the future has a verdict for each once they are committed."""
        refused = self.admission.refuse_early(new_jobs)
        if refused is None:
            future = self._submits.submit(Submission(tuple(new_jobs)))
            self.admission.on_the_way(new_jobs, future)
            return future
        at_once: Future[list[Answer]] = Future()
        at_once.set_result(list(refused))
        return at_once

    def entered(self, jobs: Sequence[NewJob]) -> None:
        """These were stored: their lanes have work, and gates perhaps somebody to let go."""
        for lane in {job.spec.pool_id for job in jobs}:
            self.publisher.nudge(lane)
        if any(job.spec.constraints or job.spec.cost_units for job in jobs):
            self.leader.hurry("gates")

    def lease(self, request: LeaseRequest) -> Future[Granted | Denied]:
        return self._leases.submit(request)

    def _store(self, submissions: list[Submission], waiting: Waiting = Waiting.ONCE) -> list[list[Answer]]:
        """Flush of the submit batcher: one transaction for all requests that waited, then a nudge per lane."""
        batch = [job for submission in submissions for job in submission.jobs]
        ruling = self.admission.ruling()
        verdicts = submit_jobs(
            self.db, batch, self.retry_policy, admit=ruling.decide, book=self.policies.book, waiting=waiting
        )
        ruling.committed()
        self.entered([job for job, verdict in zip(batch, verdicts, strict=True) if verdict is Verdict.CREATED])
        answers = iter(verdicts)
        return [[next(answers) for _ in submission.jobs] for submission in submissions]

    def _grant(self, requests: list[LeaseRequest], waiting: Waiting = Waiting.ONCE) -> list[Granted | Denied]:
        answers = grants.grant_to_clients(self.db, requests, self.terms, waiting)
        for answer in answers:
            decision = "granted" if isinstance(answer, Granted) else "denied"
            metrics.lease_decided(decision, answer.mode if isinstance(answer, Granted) else answer.code)
        return answers
