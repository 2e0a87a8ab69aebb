"""GPU leases as rows: begun by `grants`, renewed, and ended in one of two steps.

The account `gpus.leased_mb` always equals the sum of the shares (`lease_gpus`) of that GPU's active leases, because
every function here changes both in one transaction. A lease whose processes may still hold the memory is *ending*: it
counts as active until a sample of its node shows them gone (`finish_endings`), and is of no use to anybody meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy import ClauseElement, Connection, Select, bindparam, delete, or_, select, update

from orchestrator.errors import LeaseEnded, LeaseNotFound
from orchestrator.gpu import Gpu
from orchestrator.gpu.accounts import Holder, still_held
from orchestrator.leases import JOB_LEASE, Granted, lease_name, token_hash
from orchestrator.store import audit, gpus, nodes, paging
from orchestrator.store.database import RowsHeld
from orchestrator.store.dialect import by_key, in_order, seconds_since, utc_now, utc_shift, walking
from orchestrator.store.held import held
from orchestrator.store.hot import Hot, Listed, among, insert_rows, some_at_a_time
from orchestrator.store.schema import gpus as gpu_rows
from orchestrator.store.schema import lease_gpus, leases
from orchestrator.store.schema import nodes as node_rows

#: Ranges of names that one statement looks through.
NAMES = 100


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
    active = held.where(leases.c.token.in_(keys), leases.c.state == "active")
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
        .where(leases.c.token.in_(keys), leases.c.state == "active")
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
    mine = walking(select(leases.c.token), leases, "ix_leases_worker").where(
        leases.c.worker_id == worker_id, leases.c.state == "active", leases.c.ending_as.is_(None)
    )
    return list(conn.execute(mine.where(leases.c.slot == slot)).scalars())


def free(conn: Connection, keys: Sequence[str], state: str = "spent") -> int:
    """End leases and give the GPUs back what they hold. Those already over are left out.

    The rows stay a while (`forget`): deleting them by a list of keys here would lock, or wait for, the leases of
    others whenever the planner prefers to scan a small table.
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
    conn: Connection, keys: Sequence[str], state: str, reason: str | None = None, slot: str | None = None
) -> None:
    """End leases whose processes may still hold memory: at once when nobody could see that, else when they are gone."""
    if not keys:
        return
    visible = or_(leases.c.worker_id.is_not(None), leases.c.pid.is_not(None))
    if slot:  # one that ran out before does not know it yet
        ending = by_key(update(leases)).where(
            leases.c.token.in_(keys), leases.c.state == "active", leases.c.slot.is_(None)
        )
        conn.execute(ending.where(leases.c.ending_as.is_not(None)).values(slot=slot))
    conn.execute(
        by_key(update(leases))
        .where(
            leases.c.token.in_(keys),
            leases.c.state == "active",
            leases.c.mode == "gpu",
            leases.c.ending_as.is_(None),
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


def finish_endings(
    conn: Connection,
    node_id: str,
    worker_ids: Collection[str],
    sample: Sequence[Gpu],
    running: Collection[str],
    patience_s: float,
    taken_at: float | None = None,
) -> list[str]:
    """End the ending leases of a node whose processes are gone; a GPU where they do not go is quarantined.

    `worker_ids` ask, `running` are those of their slots that live; `taken_at` is the monotonic time before the sample
    was taken: it says nothing about leases that their holders used until later, nor about who went while the driver
    hung. Returns the GPUs that were quarantined.
    """
    shares = _shares(conn, node_id)
    # After the query, so that no lease seems to have ended before the sample.
    age_s = time.monotonic() - taken_at if taken_at is not None else 0.0
    endings = {key: rows for key, rows in shares.items() if rows[0].ending_as and rows[0].ending_s >= age_s}
    if not endings:
        return []
    late = {key for key, rows in endings.items() if rows[0].ending_s > patience_s + age_s}
    going_on = _holders(rows for key, rows in shares.items() if key not in endings)
    blameless = _holders(rows for key, rows in shares.items() if key not in late)
    by_uuid = {gpu.uuid: gpu for gpu in sample}
    neighbours = _neighbours(conn, worker_ids, endings)
    stuck: dict[str, str] = {}
    over: dict[str, list[str]] = {}
    for key, rows in endings.items():
        row, holder = rows[0], _holder(rows[0])
        uuids = [share.gpu_uuid for share in rows]
        seen = [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]
        if row.worker_id in neighbours and any(gpu.processes is None for gpu in seen):
            continue  # only that worker knows whether its slot runs
        others = blameless if key in late else going_on
        held = [gpu for gpu in seen if still_held(gpu, holder, running, others.get(gpu.uuid, ()))]
        if len(seen) == len(uuids) and not held:
            over.setdefault(row.ending_as, []).append(key)
        elif key in late:
            who = {gpu.uuid: _holders_of(gpu, holder) for gpu in held} or dict.fromkeys(uuids, "nobody can tell")
            stuck |= {uuid: f"memory of lease {lease_name(key)} did not come back: {why}" for uuid, why in who.items()}
            over.setdefault(row.ending_as, []).append(key)
    for state, keys in over.items():
        free(conn, sorted(keys), state)
    for uuid, reason in sorted(stuck.items()):
        gpus.quarantine(conn, [uuid], reason)
    return sorted(stuck)


def _neighbours(conn: Connection, worker_ids: Collection[str], endings: Mapping[str, list[Any]]) -> set[str]:
    """The living workers beside these whose leases are ending."""
    others = {rows[0].worker_id for rows in endings.values()} - {None, *worker_ids}
    return nodes.alive_ids(conn, sorted(others)) if others else set()


def _holder(share: Any) -> Holder:
    return Holder(share.memory_mb, share.worker_id, share.slot, share.pid)


def _holders(several: Iterable[list[Any]]) -> dict[str, list[Holder]]:
    """By GPU."""
    found: dict[str, list[Holder]] = {}
    for share in chain.from_iterable(several):
        found.setdefault(share.gpu_uuid, []).append(_holder(share))
    return found


def _holders_of(gpu: Gpu, holder: Holder) -> str:
    pids = [process.pid for process in gpu.processes or () if holder.owns(process)]
    return f"held by process {', '.join(map(str, pids[:5]))}" if pids else "nobody can tell"


def _shares(conn: Connection, node_id: str) -> dict[str, list[Any]]:
    """Of all active leases on GPUs of this node; one look, in which each of them is either ending or not."""
    rows = conn.execute(
        select(
            leases.c.token,
            leases.c.worker_id,
            leases.c.slot,
            leases.c.pid,
            leases.c.ending_as,
            seconds_since(leases.c.ending_since).label("ending_s"),
            lease_gpus.c.gpu_uuid,
            lease_gpus.c.memory_mb,
        )
        .select_from(leases.join(lease_gpus, lease_gpus.c.token == leases.c.token))
        .where(leases.c.node_id == node_id, leases.c.state == "active")
    )
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row.token, []).append(row)
    return found


def revoke(conn: Connection, lost: Mapping[str, str]) -> int:
    """End every lease on GPUs that are lost (with why): the work under them cannot go on, and nobody can look there."""
    held = (
        select(leases.c.token, leases.c.job_id, leases.c.worker_id, leases.c.agent_name, lease_gpus.c.gpu_uuid)
        .select_from(leases.join(lease_gpus, lease_gpus.c.token == leases.c.token))
        .where(lease_gpus.c.gpu_uuid.in_(sorted(lost)), leases.c.state == "active")
    )
    rows = conn.execute(walking(in_order(held), leases, "ix_leases_expiry")).all()
    for row in rows:
        reason = f"GPU {row.gpu_uuid} was lost: {lost[row.gpu_uuid]}"
        conn.execute(by_key(update(leases)).where(leases.c.token == row.token).values(end_reason=reason[:255]))
    ours = sorted({row.token for row in rows if row.worker_id is not None})
    clients = {row.token: row.agent_name for row in rows if row.worker_id is None}
    free(conn, ours)
    free(conn, sorted(clients), "expired")
    _record(conn, "lease.revoked", clients | {row.token: row.agent_name for row in rows if row.worker_id is not None})
    return len(ours) + len(clients)


def _record(conn: Connection, event: str, agents: Mapping[str, str]) -> None:
    """What became of leases, by their keys, and whose they were."""
    told = [{"lease": lease_name(key), "agent": agent} for key, agent in agents.items()]
    audit.record(conn, [audit.Event(event, details=details) for details in told])


# Whether its time is over is asked of rows that are locked: who holds one may have extended it just in time.
_BEGUN = (leases.c.state == "active", leases.c.ending_as.is_(None))
_MINE = select(leases.c.token, (leases.c.expires_at > utc_now()).label("in_time")).where(*_BEGUN)
_UNHELD = Hot(lambda keys: by_key(_MINE.where(leases.c.token.in_(keys)).with_for_update(skip_locked=True), leases))
_IN_TURN = Hot(lambda keys: by_key(_MINE.where(leases.c.token.in_(keys)).with_for_update(), leases))
_EXTEND = Hot(
    lambda keys: (
        by_key(update(leases))
        .where(leases.c.token.in_(keys), *_BEGUN)
        .values(last_heartbeat=utc_now(), expires_at=utc_shift(leases.c.ttl_seconds))
    )
)


class _Standing(NamedTuple):
    token: str
    state: str
    ending_as: str | None
    end_reason: str | None
    expires_at: datetime


_STANDING = Hot(
    lambda keys: by_key(
        select(
            leases.c.token,
            leases.c.state,
            leases.c.ending_as,
            leases.c.end_reason,
            leases.c.expires_at,
        ).where(leases.c.token.in_(keys)),
        leases,
    )
)


Extended = datetime | LeaseNotFound | LeaseEnded | RowsHeld


def heartbeats(conn: Connection, keys: Sequence[str], *, in_turn: bool = False) -> list[Extended]:
    """Extend leases by their own times to live: for each, in order, until when it lives now, or why it does not.

    An ended lease stays ended. One whose row somebody holds is left out, unless `in_turn`: then its turn is waited for.
    """
    mine = {key: bool(in_time) for key, in_time in (_IN_TURN if in_turn else _UNHELD).rows(conn, sorted({*keys}))}
    if extended := sorted(key for key, in_time in mine.items() if in_time):
        _EXTEND.run(conn, extended)
    found = {row[0]: _Standing(*row) for row in _STANDING.rows(conn, sorted({*keys}))}
    return [_extended(found.get(key), in_time=mine.get(key)) for key in keys]


def _extended(lease: _Standing | None, *, in_time: bool | None) -> Extended:
    """`in_time` is None for one that was not ours to extend: it is over, or somebody holds it."""
    if lease is None:
        return LeaseNotFound()
    if in_time:
        return lease.expires_at
    if in_time is None and lease.state == "active" and lease.ending_as is None:
        return RowsHeld(f"somebody holds the row of lease {lease_name(lease.token)}")
    return LeaseEnded(lease.ending_as or ("expired" if lease.state == "active" else lease.state), lease.end_reason)


def release(conn: Connection, token: str) -> str:
    """End a lease; again is fine. Its memory returns when its processes are gone. The state it was found in."""
    key = token_hash(token)
    row = _locked(conn, key)
    if row.state == "active" and row.ending_as is None:
        let_go(conn, [key], "released")
        _record(conn, "lease.released", {key: row.agent_name})
    state: str = row.ending_as or row.state
    return state


#: What it has of its host beside GPUs.
_OF_HOST = (leases.c.host_cpu_milli + leases.c.host_memory_mb).label("of_host")
_IS_DUE = (leases.c.state == "active", leases.c.expires_at <= utc_now())
#: Leases that `purge` and `forget` see to.
DUE = select(leases.c.token).where(*_IS_DUE)
SPENT = select(leases.c.token).where(leases.c.state == "spent")
ENDED_LONG_AGO = select(leases.c.token).where(
    among(leases.c.state, ("released", "expired")), leases.c.expires_at <= utc_shift(bindparam("ended_since_s"))
)


def purge(conn: Connection, limit: int = 200, stale_s: float = 5.0, *, unheld: bool = False) -> int:
    """End leases whose time is over; with `unheld` but for those of which somebody holds what they would give back to.

    Those of jobs too: a worker renews them while it lives, and stops what runs under them before they end. Where the
    node is silent nobody sees processes end; there the gate is closed, until a sample counts what is left as foreign.
    """
    due = conn.execute(
        select(leases.c.token, leases.c.agent_name, leases.c.node_id, _OF_HOST)
        .where(*_IS_DUE, leases.c.ending_as.is_(None))
        .order_by(leases.c.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    due = _unheld(conn, due) if unheld else due
    watched = _watched_nodes(conn, {row.node_id for row in due if row.node_id}, stale_s)
    let_go(conn, [row.token for row in due if row.node_id in watched], "expired")
    free(conn, [row.token for row in due if row.node_id not in watched], "expired")
    _record(conn, "lease.expired", {row.token: row.agent_name for row in due})
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
        select(leases.c.token, leases.c.node_id, leases.c.ending_as, _OF_HOST)
        .where(*_IS_DUE, leases.c.ending_as.is_not(None))
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    rows = _unheld(conn, rows) if unheld else rows
    watched = _watched_nodes(conn, {row.node_id for row in rows}, stale_s) if rows else set()
    gone = [row for row in rows if row.node_id not in watched]
    for state in {row.ending_as for row in gone}:
        free(conn, [row.token for row in gone if row.ending_as == state], state)
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
    if keys:
        conn.execute(delete(lease_gpus).where(lease_gpus.c.token.in_(keys)))
        conn.execute(delete(leases).where(leases.c.token.in_(keys)))
    return len(keys)


def _shares_of(keys: Collection[str]) -> Select[tuple[str, str]]:
    found = by_key(select(lease_gpus.c.token, lease_gpus.c.gpu_uuid), lease_gpus)
    return found.where(lease_gpus.c.token.in_(sorted(keys)))


def forget_jobs(conn: Connection, job_ids: Sequence[str]) -> set[str]:
    """Delete the leases of these jobs that are over; the jobs that hold one still.

    Whoever deletes a job does this first: its id may be submitted again, and that job's lease would bear the same name.
    """
    rows = [row for some in some_at_a_time(sorted(job_ids), NAMES) for row in conn.execute(_of_jobs(some))]
    over = [row.token for row in rows if row.state != "active"]
    conn.execute(delete(lease_gpus).where(lease_gpus.c.token.in_(over)))
    conn.execute(delete(leases).where(leases.c.token.in_(over)))
    return {row.job_id for row in rows if row.state == "active"}


def _of_jobs(job_ids: Sequence[str]) -> Select[tuple[str, str, str]]:
    """By their names, which begin with the job's: there is no index of jobs."""
    names = [f"{JOB_LEASE}{job_id}" for job_id in job_ids]
    ranges = [(leases.c.token > f"{name}:") & (leases.c.token < f"{name};") for name in names]  # ; comes after :
    found = select(leases.c.token, leases.c.job_id, leases.c.state)
    return found.where(or_(*ranges), leases.c.job_id.in_(job_ids))


def _locked(conn: Connection, key: str) -> Any:
    query = select(leases.c.agent_name, leases.c.state, leases.c.ending_as).where(leases.c.token == key)
    row = conn.execute(query.with_for_update()).one_or_none()
    if row is None:
        raise LeaseNotFound
    return row


def page(conn: Connection, limit: int = 1000, cursor: str | None = None) -> tuple[list[dict[str, Any]], str | None]:
    """Live leases, oldest first, and the cursor of the next page, without anything that could be used as a token."""
    ahead = paging.after(cursor, leases.c.created_at, leases.c.token, oldest_first=True)
    live = select(leases).where(leases.c.state == "active", *ahead).order_by(leases.c.created_at, leases.c.token)
    rows = conn.execute(live.limit(limit + 1)).all()
    cards = _gpus_of(conn, [row.token for row in rows[:limit]])
    shown = [
        {"lease": lease_name(row.token), **_without_token(row._asdict()), "gpus": cards.get(row.token, [])}
        for row in rows[:limit]
    ]
    if len(rows) <= limit:
        return shown, None
    last = rows[limit - 1]
    return shown, paging.encode(last.created_at, _place(last.token))


def _gpus_of(conn: Connection, keys: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """By lease, all GPUs on which it holds memory, the first of them first."""
    found: dict[str, list[dict[str, Any]]] = {}
    shares = lease_gpus.outerjoin(gpu_rows, gpu_rows.c.gpu_uuid == lease_gpus.c.gpu_uuid)
    listed = select(lease_gpus.c.token, lease_gpus.c.gpu_uuid, gpu_rows.c.gpu_index).select_from(shares)
    for some in some_at_a_time(keys):
        rows = listed.where(lease_gpus.c.token.in_(some)).order_by(gpu_rows.c.gpu_index, lease_gpus.c.gpu_uuid)
        for row in conn.execute(rows):
            found.setdefault(row.token, []).append({"gpu_uuid": row.gpu_uuid, "gpu_index": row.gpu_index})
    return found


def _place(key: str) -> str:
    """What sorts behind this lease and before any other, and tells no more than its name."""
    name = lease_name(key)
    return name if name == key else f"{name}~"  # behind all hexadecimal digits


def _without_token(lease: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lease.items() if name != "token"}
