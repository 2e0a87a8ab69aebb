"""Agents' accounts in lanes: where the jobs of a submission stand in order.

An account is the tag of an agent's last job in a lane (`orchestrator.ranking`). All accounts of a batch are charged by
one statement, in one order for all who do so; each row is the lock that puts an agent's submissions behind one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator import ranking
from orchestrator.jobs import NewJob
from orchestrator.policies import Book
from orchestrator.store.dialect import largest, upsert_returning
from orchestrator.store.schema import lane_accounts


class Account(NamedTuple):
    lane: str
    agent: str


def rank_all(conn: Connection, batch: Sequence[NewJob], virtual_times: Mapping[str, int], book: Book) -> list[int]:
    """The rank of each new job, in order; its agent is charged for it."""
    owners = [Account(job.spec.pool_id, job.spec.agent) for job in batch]
    weights = {agent: book.agent(agent).weight for agent in {owner.agent for owner in owners}}
    charges = [_charge(job, weights[job.spec.agent]) for job in batch]
    of_each: dict[Account, list[int]] = {}
    for owner, one in zip(owners, charges, strict=True):
        of_each.setdefault(owner, []).append(one)
    begins = _charged(conn, {owner: sum(several) for owner, several in of_each.items()}, virtual_times)
    tags: dict[Account, Iterator[int]] = {
        owner: ranking.tags(begins[owner], several) for owner, several in of_each.items()
    }
    return [ranking.rank(next(tags[owner]), job.spec.priority) for owner, job in zip(owners, batch, strict=True)]


def _charge(job: NewJob, weight: float) -> int:
    spec = job.spec
    return ranking.charge(ranking.cost(spec.cost_units, spec.expected_duration_sec, spec.gpu_count), weight)


def _charged(conn: Connection, sums: Mapping[Account, int], virtual_times: Mapping[str, int]) -> dict[Account, int]:
    """Charge the accounts; where the jobs of each begin."""
    rows = [
        {"lane": owner.lane, "agent": owner.agent, "last_rank": virtual_times[owner.lane] + sums[owner]}
        | {"charged": sums[owner]}
        for owner in sorted(sums)
    ]
    found = upsert_returning(conn, lane_accounts, rows, _added, ["lane", "agent", "last_rank"])
    return {Account(row.lane, row.agent): row.last_rank - sums[Account(row.lane, row.agent)] for row in found}


def _added(new: Any) -> dict[str, Any]:
    """`ranking.opened` in SQL: what is new is the clock and the charge, in one number."""
    return {
        "last_rank": largest(lane_accounts.c.last_rank, new.last_rank - new.charged) + new.charged,
        "charged": new.charged,
    }
