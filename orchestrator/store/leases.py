"""GPU leases as rows: begun by `grants`, renewed by `renewals`, and ended in one of two steps.

The account `gpus.leased_mb` always equals the sum of the shares (`lease_gpus`) of that GPU's active leases, because
every function here changes both in one transaction. A lease whose processes may still hold the memory is *ending*: it
counts as active until a sample of its node shows them gone (`endings`), and is of no use to anybody meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ClauseElement, Connection, bindparam, or_, select, update

from orchestrator.errors import LeaseNotFound
from orchestrator.leases import Granted, LeaseState, lease_name, token_hash
from orchestrator.store import audit, gpus
from orchestrator.store.dialect import by_key, in_order, unled, utc_now, walking
from orchestrator.store.hot import Hot, Listed, insert_rows
from orchestrator.store.schema import lease_gpus, leases


def insert(conn: Connection, granted: Sequence[Granted]) -> None:
    """Write the leases whose memory was taken in this transaction."""
    if not granted:
        return
    insert_rows(conn, leases, [_row(lease) for lease in granted], _DEFAULTS)
    shares = [
        {"token": lease.key, "gpu_uuid": gpu.gpu_uuid, "memory_mb": lease.request.memory_mb}
        for lease in granted
        for gpu in lease.gpus
    ]
    insert_rows(conn, lease_gpus, shares)


_DEFAULTS = {"mode": "gpu", "host_cpu_milli": 0, "host_memory_mb": 0, "resident": False, "pinned": False}


def _row(lease: Granted) -> dict[str, Any]:
    request = lease.request
    return {
        "token": lease.key,
        "agent_name": request.agent,
        "gpu_index": lease.gpus[0].gpu_index if lease.gpus else None,
        "mode": lease.mode,
        "memory_mb": request.memory_mb,
        "node_id": lease.node_id,
        "job_id": request.job_id,
        "worker_id": request.worker_id,
        "pid": request.pid,
        "model_id": request.model_id,
        "resident": request.model_key is not None,
        "slot": request.slot,
        "job_type": request.job_type,
        "pinned": request.pinned,
        "host_cpu_milli": request.host_cpu_milli if lease.gpus else 0,
        "host_memory_mb": request.host_memory_mb if lease.gpus else 0,
        "ttl_seconds": request.ttl_s,
        "expires_at": lease.expires_at,
    }


#: Of use to whoever holds it: neither over, nor ending.
LIVE = (leases.c.state == LeaseState.ACTIVE, leases.c.ending_as.is_(None))
#: Of leases that are named: those of others that live, however many, must not be looked at.
_ACTIVE = unled(leases.c.state) == LeaseState.ACTIVE


def _held_shares(keys: Listed) -> ClauseElement:
    shares = leases.outerjoin(lease_gpus, lease_gpus.c.token == leases.c.token)
    held = select(
        leases.c.token,
        leases.c.node_id,
        leases.c.host_cpu_milli,
        leases.c.host_memory_mb,
        lease_gpus.c.gpu_uuid,
        lease_gpus.c.memory_mb,
    ).select_from(shares)
    active = held.where(leases.c.token.in_(keys), _ACTIVE)
    return by_key(active.with_for_update(), leases, lease_gpus)


class _Held(NamedTuple):
    """A lease's share of a GPU; one without a GPU has none."""

    token: str
    node_id: str | None
    host_cpu_milli: int
    host_memory_mb: int
    gpu_uuid: str | None
    memory_mb: int


_HELD = Hot(_held_shares)
_END = Hot(
    lambda keys: (
        by_key(update(leases))
        .where(leases.c.token.in_(keys), _ACTIVE)
        .values(state=bindparam("as_state"), expires_at=utc_now())
    )
)


_LOCK = Hot(lambda keys: by_key(select(leases.c.token).where(leases.c.token.in_(keys)).with_for_update(), leases))


def lock(conn: Connection, keys: Collection[str]) -> None:
    """Lock all leases that a transaction is to end, keep or occupy, before anything else.

    Heartbeats lock the leases of their worker in the same order, and then GPUs: taken one by one, between GPUs, these
    would deadlock with them.
    """
    if keys:
        _LOCK.run(conn, sorted(keys))


def of_slot(conn: Connection, worker_id: str, slot: str) -> list[str]:
    """The leases in a slot's name that are not over, nor ending."""
    mine = walking(select(leases.c.token), leases, "ix_leases_worker").where(leases.c.worker_id == worker_id, *LIVE)
    return list(conn.execute(mine.where(leases.c.slot == slot)).scalars())


def free(conn: Connection, keys: Sequence[str], state: LeaseState = LeaseState.SPENT) -> int:
    """End leases and give the GPUs back what they hold. Those already over are left out.

    The rows stay a while (`lease_purge.forget`): deleting them by a list of keys here would lock, or wait for, the
    leases of others whenever the planner prefers to scan a small table.
    """
    shares = [_Held(*row) for row in _HELD.rows(conn, keys)] if keys else []
    live = {share.token: share for share in shares}
    if live:
        amounts: Counter[str] = Counter()
        for share in shares:
            if share.gpu_uuid is not None:
                amounts[share.gpu_uuid] += share.memory_mb
        _END.run(conn, sorted(live), as_state=state)
        for share in sorted(live.values(), key=lambda share: share.node_id or ""):
            if share.node_id and (share.host_cpu_milli or share.host_memory_mb):
                gpus.give_host(conn, share.node_id, share.host_cpu_milli, share.host_memory_mb)
        gpus.give(conn, amounts)
    return len(live)


def let_go(
    conn: Connection, keys: Sequence[str], state: LeaseState, reason: str | None = None, slot: str | None = None
) -> None:
    """End leases whose processes may still hold memory: at once when nobody could see that, else when they are gone."""
    if not keys:
        return
    visible = or_(leases.c.worker_id.is_not(None), leases.c.pid.is_not(None))
    if slot:  # one that ran out before does not know it yet
        ending = by_key(update(leases)).where(leases.c.token.in_(keys), _ACTIVE, leases.c.slot.is_(None))
        conn.execute(ending.where(leases.c.ending_as.is_not(None)).values(slot=slot))
    conn.execute(
        by_key(update(leases))
        .where(
            leases.c.token.in_(keys),
            _ACTIVE,
            leases.c.ending_as.is_(None),
            leases.c.mode == "gpu",
            visible,
        )
        .values(
            ending_as=state,
            ending_since=utc_now(),
            end_reason=reason,
            **({"slot": slot} if slot else {}),
        )
    )
    rows = conn.execute(select(leases.c.token).where(leases.c.token.in_(keys), leases.c.ending_as.is_(None)))
    free(conn, sorted(rows.scalars()), state)


def revoke(conn: Connection, lost: Mapping[str, str]) -> int:
    """End every lease on GPUs that are lost (with why): the work under them cannot go on, and nobody can look there."""
    held = (
        select(leases.c.token, leases.c.job_id, leases.c.worker_id, leases.c.agent_name, lease_gpus.c.gpu_uuid)
        .select_from(leases.join(lease_gpus, lease_gpus.c.token == leases.c.token))
        .where(lease_gpus.c.gpu_uuid.in_(sorted(lost)), leases.c.state == LeaseState.ACTIVE)
    )
    rows = conn.execute(walking(in_order(held), leases, "ix_leases_expiry")).all()
    for row in rows:
        reason = f"GPU {row.gpu_uuid} was lost: {lost[row.gpu_uuid]}"
        conn.execute(by_key(update(leases)).where(leases.c.token == row.token).values(end_reason=reason[:255]))
    ours = {row.token: row.agent_name for row in rows if row.worker_id is not None}
    clients = {row.token: row.agent_name for row in rows if row.worker_id is None}
    free(conn, sorted(ours))
    free(conn, sorted(clients), LeaseState.EXPIRED)
    audit_ends(conn, "lease.revoked", clients | ours)
    return len(ours) + len(clients)


def audit_ends(conn: Connection, event: str, agents: Mapping[str, str]) -> None:
    """Write down how leases ended, by their keys, and whose they were."""
    told = [{"lease": lease_name(key), "agent": agent} for key, agent in agents.items()]
    audit.record(conn, [audit.Event(event, details=details) for details in told])


def release(conn: Connection, token: str) -> LeaseState:
    """End a lease; again is fine. Its memory returns when its processes are gone. The state it was found in."""
    key = token_hash(token)
    row = _locked(conn, key)
    if row.state == LeaseState.ACTIVE and row.ending_as is None:
        let_go(conn, [key], LeaseState.RELEASED)
        audit_ends(conn, "lease.released", {key: row.agent_name})
    return LeaseState(row.ending_as or row.state)


def _locked(conn: Connection, key: str) -> Any:
    query = select(leases.c.agent_name, leases.c.state, leases.c.ending_as).where(leases.c.token == key)
    row = conn.execute(query.with_for_update()).one_or_none()
    if row is None:
        raise LeaseNotFound
    return row
