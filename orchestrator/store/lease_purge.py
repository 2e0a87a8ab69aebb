"""How leases end that nobody renews, and how rows of ended ones are deleted.

`purge` and `forget` are the leader's (`purge_leases`). `forget_jobs` is part of deleting a job, whoever does that:
`dead_letters.purge` for an operator, `retention` for the leader.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, or_, select

from orchestrator.leases import JOB_LEASE, LeaseState
from orchestrator.store import leases
from orchestrator.store.dialect import by_key, utc_now, utc_shift
from orchestrator.store.held import held
from orchestrator.store.hot import among, some_at_a_time
from orchestrator.store.schema import gpus as gpu_rows
from orchestrator.store.schema import lease_gpus
from orchestrator.store.schema import leases as lease_rows
from orchestrator.store.schema import nodes as node_rows

#: Ranges of names that one statement looks through.
NAMES = 100

#: What it has of its host beside GPUs.
_OF_HOST = (lease_rows.c.host_cpu_milli + lease_rows.c.host_memory_mb).label("of_host")
_IS_DUE = (lease_rows.c.state == LeaseState.ACTIVE, lease_rows.c.expires_at <= utc_now())
#: Leases that `purge` and `forget` see to.
DUE = select(lease_rows.c.token).where(*_IS_DUE)
SPENT = select(lease_rows.c.token).where(lease_rows.c.state == LeaseState.SPENT)
ENDED_LONG_AGO = select(lease_rows.c.token).where(
    among(lease_rows.c.state, (LeaseState.RELEASED, LeaseState.EXPIRED)),
    lease_rows.c.expires_at <= utc_shift(bindparam("ended_since_s")),
)


def purge(conn: Connection, limit: int = 200, stale_s: float = 5.0, *, unheld: bool = False) -> int:
    """End leases whose time is over; with `unheld` but for those of which somebody holds what they would give back to.

    Those of jobs too: a worker renews them while it lives, and stops what runs under them before they end. Where the
    node is silent nobody sees processes end; there the gate is closed, until a sample counts what is left as foreign.
    """
    due = conn.execute(
        select(lease_rows.c.token, lease_rows.c.agent_name, lease_rows.c.node_id, _OF_HOST)
        .where(*_IS_DUE, lease_rows.c.ending_as.is_(None))
        .order_by(lease_rows.c.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    due = _unheld(conn, due) if unheld else due
    watched = _watched_nodes(conn, {row.node_id for row in due if row.node_id}, stale_s)
    leases.let_go(conn, [row.token for row in due if row.node_id in watched], LeaseState.EXPIRED)
    leases.free(conn, [row.token for row in due if row.node_id not in watched], LeaseState.EXPIRED)
    leases.audit_ends(conn, "lease.expired", {row.token: row.agent_name for row in due})
    return len(due) + _free_unwatched(conn, stale_s, limit, unheld=unheld)


def _unheld(conn: Connection, over: Sequence[Any]) -> Sequence[Any]:
    """Those of these leases whose shares, GPUs and hosts nobody else holds; all of that is locked."""
    if not over:
        return []
    shares = _shares_of([row.token for row in over])
    uuids = {row.gpu_uuid for row in conn.execute(shares)}
    cards = by_key(select(gpu_rows.c.gpu_uuid), gpu_rows).where(gpu_rows.c.gpu_uuid.in_(sorted(uuids)))
    hosts = by_key(select(node_rows.c.node_id), node_rows)
    hosts = hosts.where(node_rows.c.node_id.in_(sorted({row.node_id for row in over if row.of_host})))
    stay = {key for key, _ in held(conn, shares)}
    full = {uuid for (uuid,) in held(conn, cards)}
    stay |= {row.token for row in conn.execute(shares) if row.gpu_uuid in full} if full else set()
    shut = {node_id for (node_id,) in held(conn, hosts)}
    return [row for row in over if row.token not in stay and not (row.of_host and row.node_id in shut)]


def _watched_nodes(conn: Connection, node_ids: Collection[str], stale_s: float) -> set[str]:
    rows = conn.execute(
        select(gpu_rows.c.node_id)
        .where(gpu_rows.c.node_id.in_(node_ids), gpu_rows.c.sampled_at > utc_shift(-stale_s))
        .distinct()
    )
    return set(rows.scalars())


def _free_unwatched(conn: Connection, stale_s: float, limit: int, *, unheld: bool = False) -> int:
    """Ending leases on nodes that fell silent before anybody saw their processes go."""
    rows = conn.execute(
        select(lease_rows.c.token, lease_rows.c.node_id, lease_rows.c.ending_as, _OF_HOST)
        .where(*_IS_DUE, lease_rows.c.ending_as.is_not(None))
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    rows = _unheld(conn, rows) if unheld else rows
    watched = _watched_nodes(conn, {row.node_id for row in rows}, stale_s) if rows else set()
    gone = [row for row in rows if row.node_id not in watched]
    for state in {LeaseState(row.ending_as) for row in gone}:
        leases.free(conn, [row.token for row in gone if row.ending_as == state], state)
    return len(gone)


def forget(conn: Connection, keep_s: float, limit: int = 500, *, unheld: bool = False) -> int:
    """Delete leases that are over: those of jobs at once, those of clients after `keep_s`.

    Until then a client's token answers "ended" rather than "unknown". With `unheld` those stay whose shares somebody
    holds.
    """
    keys: list[str] = []
    for over in (SPENT, ENDED_LONG_AGO):
        keys += conn.execute(over.limit(limit).with_for_update(skip_locked=True), {"ended_since_s": -keep_s}).scalars()
    if keys and unheld:
        stay = {key for key, _ in held(conn, _shares_of(keys))}
        keys = [key for key in keys if key not in stay]
    _delete(conn, keys)
    return len(keys)


def _delete(conn: Connection, keys: Sequence[str]) -> None:
    if keys:
        conn.execute(delete(lease_gpus).where(lease_gpus.c.token.in_(keys)))
        conn.execute(delete(lease_rows).where(lease_rows.c.token.in_(keys)))


def _shares_of(keys: Collection[str]) -> Select[tuple[str, str]]:
    found = by_key(select(lease_gpus.c.token, lease_gpus.c.gpu_uuid), lease_gpus)
    return found.where(lease_gpus.c.token.in_(sorted(keys)))


def forget_jobs(conn: Connection, job_ids: Sequence[str]) -> set[str]:
    """Delete the leases of these jobs that are over; the jobs that hold one still.

    Whoever deletes a job does this first: its id may be submitted again, and that job's lease would bear the same name.
    """
    rows = [row for some in some_at_a_time(sorted(job_ids), NAMES) for row in conn.execute(_of_jobs(some))]
    _delete(conn, [row.token for row in rows if row.state != LeaseState.ACTIVE])
    return {row.job_id for row in rows if row.state == LeaseState.ACTIVE}


def _of_jobs(job_ids: Sequence[str]) -> Select[tuple[str, str, str]]:
    """By their names, which begin with the job's: there is no index of jobs."""
    names = [f"{JOB_LEASE}{job_id}" for job_id in job_ids]
    token = lease_rows.c.token
    ranges = [(token > f"{name}:") & (token < f"{name};") for name in names]  # ; comes after :
    found = select(lease_rows.c.token, lease_rows.c.job_id, lease_rows.c.state)
    return found.where(or_(*ranges), lease_rows.c.job_id.in_(job_ids))
