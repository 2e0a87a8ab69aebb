"""HTTP workers as the store knows them, without any HTTP."""

import secrets
from dataclasses import dataclass
from typing import Any

from orchestrator.leases import Terms
from orchestrator.store import registry, reports
from orchestrator.store.claim import Claim
from orchestrator.store.database import Database
from orchestrator.store.dispatch import Claiming, Fetch
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import NO_NODE, Worker
from orchestrator.store.registry import Fetcher
from orchestrator.store.reports import Report
from orchestrator.store.settle import End, Outcome
from tests.factories import POLICY, STALE_S

TERMS = Terms(STALE_S)


def claimant(fetcher: Fetcher) -> Claimant:
    return fetcher.as_claimant(lease_ttl_s=60.0, terms=TERMS)


@dataclass
class Remote:
    db: Database
    worker_id: str

    def try_to(self, most: int = 1) -> Any:
        """The answer to a claim: jobs, or why not."""
        (answer,) = self.db.write(Claiming([Fetch(self.worker_id, most)], claimant))
        return answer

    def fetch(self, most: int = 1) -> list[Claim]:
        answer = self.try_to(most)
        assert isinstance(answer, list), answer
        return answer

    def report(self, *events: Any) -> list[Any]:
        batch = [Report(self.worker_id, event) for event in events]
        return self.db.write(lambda conn: reports.write(conn, batch, POLICY))

    def sign(self, claim: Claim) -> Any:
        return self.report(reports.Sign(claim.job_id, claim.attempt))[0]

    def finish(self, *claims: Claim) -> list[Any]:
        return self.report(*[End(claim.job_id, claim.attempt, Outcome.DONE, result="{}") for claim in claims])


def enlist(
    db: Database, pool: str = "default", node: str = NO_NODE, slots: int = 100, types: tuple[str, ...] = ("echo",)
) -> Remote:
    """Register an HTTP worker."""
    worker = Worker(f"http:0:{secrets.token_hex(4)}", node, pool, "box", 0, slots, types)
    db.write(lambda conn: registry.register(conn, worker))
    return Remote(db, worker.worker_id)
