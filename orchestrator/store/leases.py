"""GPU leases: memory is granted by a guarded UPDATE of the GPU's row, the lease is inserted in the same transaction.

The account `gpus.leased_mb` always equals the sum of the shares (`lease_gpus`) of that GPU's active leases, because
every function here changes both in one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ClauseElement, Connection, bindparam, case, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator.errors import LeaseEnded, LeaseNotFound
from orchestrator.leases import (
    Denied,
    GpuShare,
    Granted,
    LeaseRequest,
    lease_name,
    new_token,
    token_hash,
)
from orchestrator.placement import Ask, Cluster, GpuView, Placed
from orchestrator.store import audit
from orchestrator.store.database import Database
from orchestrator.store.dialect import by_key, utc_now, utc_shift
from orchestrator.store.hot import Hot, Listed, insert_rows
from orchestrator.store.schema import gpus, lease_gpus, leases

#: Times a batch is placed anew when another process took the memory between the look and the UPDATE.
MAX_ROUNDS = 4

_SNAPSHOT = select(
    gpus.c.gpu_uuid,
    gpus.c.node_id,
    gpus.c.gpu_index,
    gpus.c.usable_mb,
    gpus.c.leased_mb,
    gpus.c.foreign_mb,
    gpus.c.health,
    (gpus.c.sampled_at > utc_shift(-bindparam("stale_s"))).label("fresh"),
).order_by(gpus.c.gpu_uuid)

_TAKE = (
    update(gpus)
    .where(
        gpus.c.gpu_uuid == bindparam("uuid"),
        gpus.c.leased_mb + gpus.c.foreign_mb + bindparam("need") <= gpus.c.usable_mb,
        gpus.c.health == "ok",
        gpus.c.sampled_at > utc_shift(-bindparam("stale_s")),
    )
    .values(leased_mb=gpus.c.leased_mb + bindparam("need"))
)
_GIVE = (
    update(gpus)
    .where(gpus.c.gpu_uuid == bindparam("uuid"))
    # Never below zero, whoever edited the account: a lease that cannot end would hold up all others.
    .values(leased_mb=case((gpus.c.leased_mb < bindparam("amount"), 0), else_=gpus.c.leased_mb - bindparam("amount")))
)
_NOW = select(utc_now())


def grant(
    conn: Connection, requests: Sequence[LeaseRequest], stale_s: float, node_id: str | None = None
) -> list[Granted | Denied]:
    """Answer each request, in order. `node_id` limits all of them to the GPUs of one node."""
    placed = _place_all(conn, requests, stale_s, node_id)
    now: datetime = conn.execute(_NOW).scalar_one()
    answers: list[Granted | Denied] = []
    for request, answer in zip(requests, placed, strict=True):
        expires = now + timedelta(seconds=request.ttl_s)
        if isinstance(answer, Placed):
            shares = tuple(GpuShare(gpu.gpu_uuid, gpu.gpu_index) for gpu in answer.gpus)
            answers.append(Granted(request, "gpu", answer.gpus[0].node_id, shares, expires))
        elif request.cpu_fallback:
            answers.append(Granted(request, "cpu", node_id, (), expires))
        else:
            answers.append(answer)
    _insert(conn, [answer for answer in answers if isinstance(answer, Granted)])
    return answers


def grant_to_clients(db: Database, requests: Sequence[LeaseRequest], stale_s: float) -> list[Granted | Denied]:
    """Answer requests from outside in one transaction of their own, with their audit rows."""
    try:
        return db.write(lambda conn: _grant_and_record(conn, requests, stale_s))
    except IntegrityError:
        # Tokens are random: the only way to meet one's own is a commit whose answer was lost. Undo it, begin anew.
        db.write(lambda conn: free(conn, [request.key for request in requests]))
        anew = [replace(request, token=new_token()) for request in requests]
        return db.write(lambda conn: _grant_and_record(conn, anew, stale_s))


def _grant_and_record(conn: Connection, requests: Sequence[LeaseRequest], stale_s: float) -> list[Granted | Denied]:
    answers = grant(conn, requests, stale_s)
    audit.record(conn, [_granted_event(answer) for answer in answers if isinstance(answer, Granted)])
    return answers


def _granted_event(lease: Granted) -> audit.Event:
    details = {
        "lease": lease_name(lease.key),
        "mode": lease.mode,
        "memory_mb": lease.request.memory_mb,
        "gpus": [gpu.gpu_uuid for gpu in lease.gpus],
    }
    return audit.Event("lease.granted", actor=lease.request.agent, details=details)


def _place_all(
    conn: Connection, requests: Sequence[LeaseRequest], stale_s: float, node_id: str | None
) -> list[Placed | Denied]:
    """Propose on a snapshot, take by guarded UPDATE, and propose again for those whose GPU was taken meanwhile."""
    answers: dict[int, Placed | Denied] = {}
    open_requests = list(range(len(requests)))
    for _ in range(MAX_ROUNDS):
        proposals = _propose(snapshot(conn, stale_s, node_id), [(i, requests[i]) for i in open_requests], answers)
        open_requests = _take(conn, requests, proposals, stale_s)
        answers |= {i: placed for i, placed in proposals.items() if i not in open_requests}
        if not open_requests:
            break
    for i in open_requests:
        answers[i] = Denied("other requests took the memory first", retry_after_s=0.1)
    return [answers[i] for i in range(len(requests))]


def snapshot(conn: Connection, stale_s: float, node_id: str | None = None) -> list[GpuView]:
    statement = _SNAPSHOT if node_id is None else _SNAPSHOT.where(gpus.c.node_id == bindparam("node"))
    rows = conn.execute(statement, {"stale_s": stale_s, "node": node_id} if node_id else {"stale_s": stale_s})
    return [GpuView(**row._asdict()) for row in rows]


def largest_gpu_mb(conn: Connection) -> int:
    """What the largest GPU of the cluster could lease when it is empty."""
    return int(conn.execute(select(func.max(gpus.c.usable_mb))).scalar() or 0)


def _propose(
    views: list[GpuView], requests: list[tuple[int, LeaseRequest]], answers: dict[int, Placed | Denied]
) -> dict[int, Placed]:
    """Place one after the other, each seeing what the earlier ones took; refusals are final for this batch."""
    cluster = Cluster(views)
    proposals = {}
    for i, request in requests:
        ask = Ask(request.memory_mb, request.gpu_count, request.node_id, request.key)
        choice = cluster.place(ask)
        if isinstance(choice, Placed):
            proposals[i] = choice
            cluster.take(ask, choice)
        else:
            answers[i] = Denied(choice.reason)
    return proposals


def _take(
    conn: Connection, requests: Sequence[LeaseRequest], proposals: Mapping[int, Placed], stale_s: float
) -> list[int]:
    """One guarded UPDATE per GPU for all its proposals; returns those that did not get every GPU they need."""
    need: Counter[str] = Counter()
    for i, placed in proposals.items():
        for gpu in placed.gpus:
            need[gpu.gpu_uuid] += requests[i].memory_mb
    # Sorted: two batches take the rows in the same order and cannot deadlock.
    refused = {
        uuid
        for uuid in sorted(need)
        if conn.execute(_TAKE, {"uuid": uuid, "need": need[uuid], "stale_s": stale_s}).rowcount != 1
    }
    lost = [i for i, placed in proposals.items() if any(gpu.gpu_uuid in refused for gpu in placed.gpus)]
    undo: Counter[str] = Counter()
    for i in lost:
        for gpu in proposals[i].gpus:
            if gpu.gpu_uuid not in refused:
                undo[gpu.gpu_uuid] += requests[i].memory_mb
    _give_back(conn, undo)
    return lost


def _give_back(conn: Connection, amounts: Mapping[str, int]) -> None:
    for uuid in sorted(amounts):
        conn.execute(_GIVE, {"uuid": uuid, "amount": amounts[uuid]})


def _insert(conn: Connection, granted: list[Granted]) -> None:
    if not granted:
        return
    insert_rows(conn, leases, [_row(lease) for lease in granted])
    shares = [
        {"token": lease.key, "gpu_uuid": gpu.gpu_uuid, "memory_mb": lease.request.memory_mb}
        for lease in granted
        for gpu in lease.gpus
    ]
    insert_rows(conn, lease_gpus, shares)


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
        "ttl_seconds": request.ttl_s,
        "expires_at": lease.expires_at,
    }


def _held_shares(keys: Listed) -> ClauseElement:
    shares = leases.outerjoin(lease_gpus, lease_gpus.c.token == leases.c.token)
    held = select(leases.c.token, lease_gpus.c.gpu_uuid, lease_gpus.c.memory_mb).select_from(shares)
    active = held.where(leases.c.token.in_(keys), leases.c.state == "active")
    return by_key(active.with_for_update(), leases, lease_gpus)


_HELD = Hot(_held_shares)
_END = Hot(
    lambda keys: (
        by_key(update(leases))
        .where(leases.c.token.in_(keys), leases.c.state == "active")
        .values(state=bindparam("as_state"), expires_at=utc_now())
    )
)


def free(conn: Connection, keys: Sequence[str]) -> int:
    """End the leases of jobs and return their memory. Those already over are left out."""
    return _end(conn, keys, "spent")


def _end(conn: Connection, keys: Sequence[str], state: str) -> int:
    """Give the GPUs back what these leases hold.

    The rows stay a while (`forget`): deleting them by a list of keys here would lock, or wait for, the leases of
    others whenever the planner prefers to scan a small table.
    """
    shares = _HELD.run(conn, keys).all() if keys else []
    live = sorted({share.token for share in shares})
    if live:
        amounts: Counter[str] = Counter()
        for share in shares:
            if share.gpu_uuid is not None:
                amounts[share.gpu_uuid] += share.memory_mb
        _END.run(conn, live, as_state=state)
        _give_back(conn, amounts)
    return len(live)


def heartbeat(conn: Connection, token: str) -> datetime:
    """Extend a lease by its own time to live. Raises LeaseNotFound or LeaseEnded: an ended lease stays ended."""
    key = token_hash(token)
    extended = conn.execute(
        update(leases)
        .where(leases.c.token == key, leases.c.state == "active", leases.c.expires_at > utc_now())
        .values(last_heartbeat=utc_now(), expires_at=utc_shift(leases.c.ttl_seconds))
    )
    row = _find(conn, key)
    if extended.rowcount != 1:
        raise LeaseEnded("expired" if row.state == "active" else row.state)
    expires: datetime = row.expires_at
    return expires


def release(conn: Connection, token: str, actor: str | None = None) -> str:
    """End a lease and return its memory; again is fine. Returns the state it was found in."""
    key = token_hash(token)
    row = _find(conn, key, lock=True)
    if row.state == "active":
        _end(conn, [key], "released")
        audit.record(
            conn, [audit.Event("lease.released", actor=actor or row.agent_name, details={"lease": lease_name(key)})]
        )
    state: str = row.state
    return state


def purge(conn: Connection, limit: int = 200) -> int:
    """End leases whose time is over.

    Those of jobs too: a worker renews them while it lives, and stops what runs under them before they end.
    """
    due = conn.execute(
        select(leases.c.token, leases.c.agent_name)
        .where(leases.c.state == "active", leases.c.expires_at <= utc_now())
        .order_by(leases.c.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    _end(conn, [row.token for row in due], "expired")
    audit.record(
        conn,
        [audit.Event("lease.expired", actor=row.agent_name, details={"lease": lease_name(row.token)}) for row in due],
    )
    return len(due)


def forget(conn: Connection, keep_s: float, limit: int = 500) -> int:
    """Delete leases that are over: those of jobs at once, those of clients after `keep_s`.

    Until then a client's token answers "ended" rather than "unknown".
    """
    spent = select(leases.c.token).where(leases.c.state == "spent")
    ended = select(leases.c.token).where(
        leases.c.state.in_(("released", "expired")), leases.c.expires_at <= utc_shift(-keep_s)
    )
    keys: list[str] = []
    for over in (spent, ended):
        keys += conn.execute(over.limit(limit).with_for_update(skip_locked=True)).scalars()
    if keys:
        conn.execute(delete(lease_gpus).where(lease_gpus.c.token.in_(keys)))
        conn.execute(delete(leases).where(leases.c.token.in_(keys)))
    return len(keys)


def forget_jobs(conn: Connection, job_ids: Sequence[str]) -> set[str]:
    """Delete the leases of these jobs that are over; the jobs that hold one still."""
    rows = conn.execute(
        select(leases.c.token, leases.c.job_id, leases.c.state).where(leases.c.job_id.in_(job_ids))
    ).all()
    over = [row.token for row in rows if row.state != "active"]
    conn.execute(delete(lease_gpus).where(lease_gpus.c.token.in_(over)))
    conn.execute(delete(leases).where(leases.c.token.in_(over)))
    return {row.job_id for row in rows if row.state == "active"}


def _find(conn: Connection, key: str, *, lock: bool = False) -> Any:
    query = select(leases.c.agent_name, leases.c.state, leases.c.expires_at).where(leases.c.token == key)
    row = conn.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise LeaseNotFound
    return row


def active(conn: Connection, limit: int = 1000) -> list[dict[str, Any]]:
    """Live leases, oldest first, without anything that could be used as a token."""
    rows = conn.execute(select(leases).where(leases.c.state == "active").order_by(leases.c.created_at).limit(limit))
    return [{"lease": lease_name(row.token), **_without_token(row._asdict())} for row in rows]


def _without_token(lease: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lease.items() if name != "token"}
