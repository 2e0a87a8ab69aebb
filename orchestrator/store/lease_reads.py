"""What people ask about leases; nothing in it can be used as a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select

from orchestrator.leases import LeaseState, lease_name
from orchestrator.store import paging
from orchestrator.store.hot import some_at_a_time
from orchestrator.store.schema import gpus as gpu_rows
from orchestrator.store.schema import lease_gpus, leases


def page(conn: Connection, limit: int = 1000, cursor: str | None = None) -> tuple[list[dict[str, Any]], str | None]:
    """Active leases, oldest first, and the cursor of the next page, without anything that could be used as a token."""
    ahead = paging.after(cursor, leases.c.created_at, leases.c.token, oldest_first=True)
    active = select(leases).where(leases.c.state == LeaseState.ACTIVE, *ahead)
    rows = conn.execute(active.order_by(leases.c.created_at, leases.c.token).limit(limit + 1)).all()
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
