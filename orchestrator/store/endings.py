"""Leases whose processes may hold memory still (`leases.let_go`): over when a sample of their node shows them gone."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Connection, select

from orchestrator.gpu import Gpu
from orchestrator.gpu.accounts import Holder, still_held
from orchestrator.leases import LeaseState, lease_name
from orchestrator.store import gpus, leases, nodes
from orchestrator.store.dialect import seconds_since
from orchestrator.store.schema import lease_gpus
from orchestrator.store.schema import leases as lease_rows


def finish(
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
    over: dict[LeaseState, list[str]] = {}
    for key, rows in endings.items():
        row, holder = rows[0], _holder(rows[0])
        uuids = [share.gpu_uuid for share in rows]
        seen = [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]
        if row.worker_id in neighbours and any(gpu.processes is None for gpu in seen):
            continue  # only that worker knows whether its slot runs
        others = blameless if key in late else going_on
        held = [gpu for gpu in seen if still_held(gpu, holder, running, others.get(gpu.uuid, ()))]
        if len(seen) == len(uuids) and not held:
            over.setdefault(LeaseState(row.ending_as), []).append(key)
        elif key in late:
            who = {gpu.uuid: _holders_of(gpu, holder) for gpu in held} or dict.fromkeys(uuids, "nobody can tell")
            stuck |= {uuid: f"memory of lease {lease_name(key)} did not come back: {why}" for uuid, why in who.items()}
            over.setdefault(LeaseState(row.ending_as), []).append(key)
    for state, keys in over.items():
        leases.free(conn, sorted(keys), state)
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
            lease_rows.c.token,
            lease_rows.c.worker_id,
            lease_rows.c.slot,
            lease_rows.c.pid,
            lease_rows.c.ending_as,
            seconds_since(lease_rows.c.ending_since).label("ending_s"),
            lease_gpus.c.gpu_uuid,
            lease_gpus.c.memory_mb,
        )
        .select_from(lease_rows.join(lease_gpus, lease_gpus.c.token == lease_rows.c.token))
        .where(lease_rows.c.node_id == node_id, lease_rows.c.state == LeaseState.ACTIVE)
    )
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row.token, []).append(row)
    return found
