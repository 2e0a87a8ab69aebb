"""What gates know, as rows.

The leader looks at what is measured and writes it down (`gate_states`), so that all instances decide alike, also after
a failover, and everybody can see it; a look that is old counts as none. An agent's gate is closed by whoever sees it
above its mark, and opened by the leader. What counts until a job ends is a row as well (`gate_holds`): units, jobs that
run because it is quiet, and jobs in flight of agents that have a limit. Agents without one cost nothing.

Nothing here reads a backlog: counts stop at their limit, and those who wait are found by what they wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, func, select

from orchestrator.gates import AGENT, GateState
from orchestrator.gpu import Health
from orchestrator.jobs import DUE, OWNED, TERMINAL
from orchestrator.leases import LeaseState
from orchestrator.store.dialect import by_key, clock, in_order, seconds_since, upsert, utc_now, utc_shift, walking
from orchestrator.store.held import held
from orchestrator.store.job_reads import statuses
from orchestrator.store.schema import gate_holds, gate_states, gpus, jobs, lease_gpus, leases

#: Seconds after which what the leader wrote down is nobody's knowledge any more.
STALE_STATE_S = 10.0
#: Holds that one statement compares with their jobs, and one look.
SWEEP, MOST_SWEPT = 1000, 20_000
#: Jobs that are owned at once, at most: slots of a large cluster.
MOST_OWNED = 20_000


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Seen:
    """A gate as it was written down so many seconds ago."""

    state: GateState
    age_s: float

    @property
    def fresh(self) -> GateState | None:
        return self.state if self.age_s <= STALE_STATE_S else None


def states(conn: Connection) -> dict[str, Seen]:
    rows = conn.execute(
        select(
            gate_states.c.name,
            gate_states.c.closed,
            gate_states.c.since,
            gate_states.c.reason,
            seconds_since(gate_states.c.looked_at).label("age_s"),
        )
    )
    return {row.name: Seen(GateState(bool(row.closed), row.since, row.reason), float(row.age_s)) for row in rows}


def unheld_states(conn: Connection, names: Collection[str]) -> set[str]:
    """Those of these whose rows nobody else holds."""
    some = by_key(select(gate_states.c.name), gate_states).where(gate_states.c.name.in_(sorted(names)))
    return {*names} - {name for (name,) in held(conn, some)} if names else set()


def write_states(conn: Connection, found: Mapping[str, GateState]) -> None:
    rows = [
        {"name": name, "closed": state.closed, "since": state.since, "reason": state.reason[:255]}
        for name, state in sorted(found.items())
    ]
    if rows:
        upsert(conn, gate_states, rows, lambda _new: {"looked_at": utc_now()})


def close_agents(conn: Connection, reasons: Mapping[str, str], now: datetime) -> None:
    """Until the leader sees them below their marks."""
    write_states(
        conn, {f"{AGENT}{agent}": GateState(closed=True, since=now, reason=why) for agent, why in reasons.items()}
    )


def forget_states(conn: Connection, names: Collection[str]) -> None:
    if names:
        conn.execute(delete(gate_states).where(gate_states.c.name.in_(sorted(names))))


def listing(conn: Connection) -> list[dict[str, Any]]:
    """All gates that were looked at, for people."""
    rows = conn.execute(select(gate_states).order_by(gate_states.c.name).limit(1000))
    return [row._asdict() | {"closed": bool(row.closed)} for row in rows]


# ── what is measured ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Measured:
    """Of all GPUs that answer and were sampled lately; None: there is no such sample."""

    now: datetime
    used_pct: float | None
    load_pct: float | None


def measured(conn: Connection, stale_s: float) -> Measured:
    row = conn.execute(
        select(
            func.sum(gpus.c.used_mb).label("used"),
            func.sum(gpus.c.total_mb).label("total"),
            func.avg(gpus.c.utilization).label("load"),
        ).where(gpus.c.sampled_at > utc_shift(-stale_s), gpus.c.health == Health.OK)
    ).one()
    used_pct = 100 * float(row.used) / float(row.total) if row.total else None
    return Measured(clock(conn), used_pct, None if row.load is None else float(row.load))


def waiting_in(conn: Connection, lane: str, most: int) -> int:
    """Jobs of a lane that wait for a worker, counted up to `most`."""
    waiting = jobs.c.queued.in_(DUE)
    some = select(jobs.c.queued).where(jobs.c.lane == lane, waiting).limit(most).subquery()
    return int(conn.execute(select(func.count()).select_from(some)).scalar_one())


def leased_mb(conn: Connection) -> dict[str, int]:
    """By agent, the GPU memory of its leases: one look for all."""
    held = (
        select(leases.c.agent_name, func.sum(lease_gpus.c.memory_mb))
        .select_from(leases.join(lease_gpus, lease_gpus.c.token == leases.c.token))
        .where(leases.c.state == LeaseState.ACTIVE)
        .group_by(leases.c.agent_name)
    )
    return {agent: int(total) for agent, total in conn.execute(walking(in_order(held), leases, "ix_leases_expiry"))}


def owned_units(conn: Connection, without: Collection[str]) -> float:
    """Units of jobs that workers own and the leader did not let go: they came before there was a capacity."""
    rows = conn.execute(
        walking(select(jobs.c.job_id, jobs.c.cost_units), jobs, "ix_jobs_status")
        .where(jobs.c.status.in_(sorted(OWNED)), jobs.c.cost_units > 0)
        .limit(MOST_OWNED)
    )
    return float(sum(row.cost_units for row in rows if row.job_id not in without))


# ── holds ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Hold:
    """A job that counts against a gate until it ends."""

    gate: str
    job_id: str
    amount: float = 1.0


def hold(conn: Connection, holds: Sequence[Hold]) -> None:
    """Again is fine: a job that was purged may come back under its id."""
    ordered = sorted(holds, key=lambda one: (one.gate, one.job_id))
    if ordered:
        rows = [{"gate": one.gate, "job_id": one.job_id, "amount": one.amount} for one in ordered]
        upsert(conn, gate_holds, rows, lambda _new: {})


def unheld(conn: Connection, gates: Collection[str], job_ids: Collection[str]) -> set[str]:
    """Those of these jobs of whose holds at these gates nobody else holds a row; the holds are locked."""
    some = by_key(select(gate_holds.c.gate, gate_holds.c.job_id), gate_holds)
    some = some.where(gate_holds.c.gate.in_(sorted(gates)), gate_holds.c.job_id.in_(sorted(job_ids)))
    return {*job_ids} - {job_id for _, job_id in held(conn, some)} if job_ids else set()


def _page(conn: Connection, gate: str, after: str, most: int) -> dict[str, float]:
    mine = select(gate_holds.c.job_id, gate_holds.c.amount).where(
        gate_holds.c.gate == gate, gate_holds.c.job_id > after
    )
    return {row.job_id: row.amount for row in conn.execute(mine.order_by(gate_holds.c.job_id).limit(most))}


def let_go(conn: Connection, gate: str, job_ids: Collection[str]) -> None:
    if job_ids:
        conn.execute(delete(gate_holds).where(gate_holds.c.gate == gate, gate_holds.c.job_id.in_(sorted(job_ids))))


def sweep(conn: Connection, gate: str, most: int = MOST_SWEPT) -> dict[str, float]:
    """The first `most` jobs that count, with what they count, after those that ended were let go."""
    kept: dict[str, float] = {}
    after, looked = "", 0
    while looked < most:
        size = min(SWEEP, most - looked)
        found = _page(conn, gate, after, size)
        known = statuses(conn, list(found)) if found else {}
        over = {job_id for job_id in found if job_id not in known or known[job_id] in TERMINAL}
        let_go(conn, gate, unheld(conn, [gate], over))
        kept |= {job_id: amount for job_id, amount in found.items() if job_id not in over}
        if len(found) < size:
            break
        after, looked = max(found), looked + size
    return kept


def in_flight(conn: Connection, agent: str, limit: int, *, exact: bool = False) -> int:
    """Jobs of an agent that count, up to one above its limit. Those that ended count until it matters."""
    gate = f"{AGENT}{agent}"
    count = _count(conn, gate, limit + 1)
    if count < limit and not exact:
        return count
    kept = sweep(conn, gate)
    return len(kept) if len(kept) < MOST_SWEPT else _count(conn, gate, limit + 1)


def _count(conn: Connection, gate: str, most: int) -> int:
    some = select(gate_holds.c.job_id).where(gate_holds.c.gate == gate).limit(most).subquery()
    return int(conn.execute(select(func.count()).select_from(some)).scalar_one())
