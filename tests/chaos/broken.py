"""Builds with a guard removed: copies of the packages with a few words changed. The checker must catch each."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tests.chaos.sites import ROOT

#: Of a run: has a `build`.
Plan = TypeVar("Plan", bound=Any)


@dataclass(frozen=True)
class Edit:
    """Replace a text that stands exactly once in a file."""

    path: str
    old: str
    new: str


BUILDS: dict[str, tuple[Edit, ...]] = {
    # A worker that was declared lost wakes up and ends the job that another one runs by now.
    "attempt-guard": (
        Edit(
            "orchestrator/store/moves.py",
            'jobs.c.attempt == bindparam("owned_attempt"),',
            'bindparam("owned_attempt", type_=Float) > -1,',
        ),
        Edit("orchestrator/store/moves.py", "    if arrow.source <= OWNED:\n", "    if not arrow.source:\n"),
        Edit(
            "orchestrator/store/settle.py",
            "(row.attempt, row.worker_id) == (event.attempt, by.owner) and row.status in states",
            "row.status in states",
        ),
    ),
    # Every entry leads to a claim, whatever state its job is in.
    "status-guard": (
        Edit("orchestrator/store/moves.py", "unled(jobs.c.status).in_(sources),", "jobs.c.status.is_not(None),"),
        Edit("orchestrator/store/offers.py", "jobs.c.queued.in_(CLAIMABLE)", "jobs.c.status.is_not(None)"),
    ),
    # Jobs are in the stream before their rows are committed.
    "publish-before-commit": (
        Edit(
            "orchestrator/daemon.py",
            "        verdicts = submit_jobs(",
            "        from orchestrator.jobs import Ready\n"
            "        for job in batch:\n"
            "            self.hub.lane(job.spec.pool_id).announce([Ready(job.job_id, job.spec.type, None)])\n"
            "        verdicts = submit_jobs(",
        ),
    ),
    # Jobs are accepted before their rows are committed.
    "answer-before-commit": (
        Edit(
            "orchestrator/daemon.py",
            "            future = self._submits.submit(Submission(tuple(new_jobs)))",
            "            self._submits.post(Submission(tuple(new_jobs)))\n"
            "            future: Future[list[Answer]] = Future()\n"
            "            future.set_result([Verdict.CREATED] * len(new_jobs))",
        ),
    ),
    # Memory is taken from the GPU that looked free a moment ago.
    "lease-guard": (
        Edit(
            "orchestrator/store/gpus.py",
            '            gpus.c.leased_mb + gpus.c.foreign_mb + bindparam("need") <= gpus.c.usable_mb,\n',
            "",
        ),
    ),
    # The lease of an attempt outlives it.
    "lease-leak": (
        Edit(
            "orchestrator/store/settle.py",
            "        end_leases(conn, [(end.lease_key",
            "        _ = (conn, [(end.lease_key",
        ),
    ),
    # The following are for tests.chaos.leases. Memory of strangers counts as free.
    "stranger-guard": (
        Edit("orchestrator/store/gpus.py", '"foreign_mb": foreign_mb(gpu,', '"foreign_mb": 0 * foreign_mb(gpu,'),
    ),
    # Memory is given away with the release, whoever uses it still.
    "release-guard": (
        Edit(
            "orchestrator/store/leases.py",
            "        let_go(conn, [key], LeaseState.RELEASED)\n",
            "        free(conn, [key], LeaseState.RELEASED)\n",
        ),
    ),
    # Leases outlive their card.
    "loss-guard": (Edit("orchestrator/store/inventory.py", "    if lost:\n", "    if not sample:\n"),),
    # The following are for tests.chaos.pools. A supervisor goes on with what nobody asks it for any more.
    "vanished-orders": (
        Edit(
            "worker/supervisor.py",
            "        elif not service.leaving and not self._fills_in(service):  # nobody wants it any more",
            "        elif service.leaving:  # nobody wants it any more",
        ),
    ),
    # The leader forgets where a pool that drains has workers, so that they hear too late how soon they must leave.
    "drained-assignments": (
        Edit("orchestrator/crews.py", "return (pool.assigned if pool.to_leave else {}), 0", "return {}, 0"),
        Edit(
            "worker/supervisor.py",
            "            service.leave(self._settings.pool_drain_s)",
            "            service.leave(600)",
        ),
    ),
    # Slots outlive their supervisor.
    "parent-death": (
        Edit("worker/slot.py", "    wire.die_with_parent(int(parent_pid))\n", ""),
        Edit(
            "worker/slot.py",
            "    except (EOFError, BrokenPipeError, ConnectionResetError):\n        return",
            "    except (EOFError, BrokenPipeError, ConnectionResetError):\n        time.sleep(600)",
        ),
    ),
    # The lease of a model outlives its slot.
    "model-lease-leak": (
        Edit(
            "worker/parts.py",
            "        self._custody.after(Departure(slot, model.key, model.gpus))",
            "        _ = Departure(slot, model.key, model.gpus)",
        ),
    ),
    # Whoever has read an entry may claim it, whatever became of the pool meanwhile.
    "closed-pool-guard": (
        Edit(
            "orchestrator/store/claim.py",
            "if by.pool_id != DEFAULT_LANE and (closed := pools.closed_to_claims(conn, by.pool_id)):",
            "if not by.pool_id and (closed := pools.closed_to_claims(conn, by.pool_id)):",
        ),
    ),
    # A job that was handed back pays for the drain.
    "charged-drain": (
        Edit("orchestrator/store/moves.py", '_UNOWNED | _DUE | {"attempts": jobs.c.attempts - 1}', "_UNOWNED | _DUE"),
    ),
}


@contextmanager
def sabotaged(plan: Plan, name: str | None) -> Iterator[Plan]:
    """The plan with that build, while it exists; without a name as it is."""
    with tempfile.TemporaryDirectory(prefix="orch-broken-") as folder:
        yield replace(plan, build=build(name, Path(folder))) if name else plan


def build(name: str, folder: Path) -> Path:
    """A copy of the packages with that build's edits; its folder."""
    for package in ("orchestrator", "worker", "sql"):
        shutil.copytree(ROOT / package, folder / package)  # with what is compiled: files keep their times
    for edit in BUILDS[name]:
        path = folder / edit.path
        text = path.read_text()
        assert text.count(edit.old) == 1, f"{edit.path} has {text.count(edit.old)} times: {edit.old}"
        path.write_text(text.replace(edit.old, edit.new))
    return folder
