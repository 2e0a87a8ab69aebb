"""What must hold of the whole history of a run: what holds of every chaos run, and what is said of pools."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.jobs import TERMINAL
from tests.chaos import checker
from tests.chaos.checker import View, Violation
from tests.chaos.history import History

#: Events after which a pool takes no jobs, until it is created again.
CLOSING = {"pool.draining", "pool.evicted", "pool.stopped", "pool.deleted"}


@dataclass(frozen=True)
class Hurt:
    """Who was killed or frozen: supervisors by process id, workers of which a slot was."""

    supervisors: set[int] = field(default_factory=set)
    workers: set[str] = field(default_factory=set)

    def explains(self, worker_id: str) -> bool:
        return worker_id in self.workers or any(f":{pid}:" in worker_id for pid in self.supervisors)


def check(history: History, hurt: Hurt) -> list[Violation]:
    view = View(history)
    found = checker.check(history)
    for ours in (closed_pools_claim_nothing, only_attempts_that_ended_badly_are_charged):
        found += ours(view)
    return found + list(failures_have_a_cause(view, hurt))


def closed_pools_claim_nothing(view: View) -> Iterator[Violation]:
    """Claims and drains lock the pool's row, so the ids of their audit rows have the order of their commits."""
    closed: dict[str, str] = {}
    for event in view.history.audit:
        pool_id, name = event.get("pool_id") or "", event["event_type"]
        if name in CLOSING:
            closed.setdefault(pool_id, name)
        elif name == "pool.created":
            closed.pop(pool_id, None)
        elif name == "job.claimed" and pool_id in closed:
            text = f"attempt {event['attempt']} was claimed after {closed[pool_id]} of {pool_id}"
            yield Violation("INV-22", event["job_id"], text)


def only_attempts_that_ended_badly_are_charged(view: View) -> Iterator[Violation]:
    """Whoever was handed back, by a drain, an eviction or the end of a worker, is not charged for it."""
    for job_id, row in view.history.jobs.items():
        events = Counter(event["event_type"] for event in view.events[job_id])
        due = events["job.retry"] + (row["status"] in TERMINAL)
        if row["status"] in TERMINAL and row["attempts"] != due:
            handed_back = events["job.handed_back"]
            text = f"{row['attempts']} attempts charged; {due} ended, {handed_back} were handed back"
            yield Violation("INV-22", job_id, text)


def failures_have_a_cause(view: View, hurt: Hurt) -> Iterator[Violation]:
    """An attempt fails only because somebody killed or froze what ran it, or its worker fell silent."""
    for job_id in view.history.jobs:
        owner = {event["attempt"]: event["worker_id"] for event in view.named(job_id, "job.claimed")}
        for event in view.named(job_id, "job.retry"):
            worker = owner.get(event["attempt"])
            if worker and not hurt.explains(worker) and worker not in view.lost_workers:
                text = f"attempt {event['attempt']} failed on {worker}, which nobody hurt: {event['details']}"
                yield Violation("INV-22", job_id, text)
