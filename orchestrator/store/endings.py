"""Leases whose processes may hold memory still (`leases.let_go`): over when a sample of their node shows them gone."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row

from orchestrator.gpu import Gpu
from orchestrator.gpu.accounts import Holder, still_held
from orchestrator.leases import LeaseState, lease_name
from orchestrator.store import gpus, leases, nodes
from orchestrator.store.dialect import seconds_since
from orchestrator.store.schema import leases as lease_rows

#: By lease, what it holds on each of its GPUs.
Shares = Mapping[str, Sequence[Row[Any]]]


@dataclass(frozen=True)
class Sighting:
    """What a process saw of its node."""

    #: The GPUs that answered.
    sample: Sequence[Gpu]
    #: The workers that it runs, and those of their slots that live.
    worker_ids: Collection[str]
    running: Collection[str]
    #: The monotonic time before the sample was taken (None: just now): it says nothing about leases that their holders
    #: used until later, nor about who went while the driver hung.
    taken_at: float | None = None

    def age_s(self) -> float:
        return time.monotonic() - self.taken_at if self.taken_at is not None else 0.0


def finish(conn: Connection, node_id: str, sighting: Sighting, patience_s: float) -> list[str]:
    """End the ending leases of a node whose processes are gone; a GPU where they do not go is quarantined.

    Returns the GPUs that were quarantined.
    """
    look = _look(conn, node_id, sighting, patience_s)
    return _apply(conn, [verdict for key in look.endings if (verdict := look.verdict(key)) is not None])


# ── what there is ───────────────────────────────────────────────────────────────────────────────────────────────


def _look(conn: Connection, node_id: str, sighting: Sighting, patience_s: float) -> _Look:
    shares = _shares(conn, node_id)
    # After the query, so that no lease seems to have ended before the sample.
    age_s = sighting.age_s()
    endings = {key: rows for key, rows in shares.items() if rows[0].ending_as and rows[0].ending_s >= age_s}
    late = {key for key, rows in endings.items() if rows[0].ending_s > patience_s + age_s}
    return _Look(sighting, shares, endings, late, _neighbours(conn, sighting.worker_ids, endings))


def _shares(conn: Connection, node_id: str) -> Shares:
    """Of all active leases on GPUs of this node; one look, in which each of them is either ending or not."""
    ending_s = seconds_since(lease_rows.c.ending_since).label("ending_s")
    found: dict[str, list[Row[Any]]] = {}
    for share in gpus.shares(conn, node_id, lease_rows.c.token, lease_rows.c.ending_as, ending_s):
        found.setdefault(share.token, []).append(share)
    return found


def _neighbours(conn: Connection, worker_ids: Collection[str], endings: Shares) -> set[str]:
    """The living workers beside these whose leases are ending."""
    others = {rows[0].worker_id for rows in endings.values()} - {None, *worker_ids}
    return nodes.alive_ids(conn, sorted(others)) if others else set()


# ── what to think of it ─────────────────────────────────────────────────────────────────────────────────────────


class _Verdict(NamedTuple):
    """A lease is over, and these GPUs (with why) are not to be given to anybody else."""

    key: str
    state: LeaseState
    stuck: Mapping[str, str]


@dataclass(frozen=True)
class _Look:
    """All leases on a node, beside what was seen there."""

    sighting: Sighting
    shares: Shares
    #: Those that the sample can tell of; and which of these have been ending for longer than anybody waits.
    endings: Shares
    late: Collection[str]
    #: Workers of other processes that live, and whose leases are ending.
    neighbours: Collection[str]

    def verdict(self, key: str) -> _Verdict | None:
        """None: it goes on ending."""
        rows = self.endings[key]
        uuids = [share.gpu_uuid for share in rows]
        seen = [self._gpus[uuid] for uuid in uuids if uuid in self._gpus]
        if rows[0].worker_id in self.neighbours and any(gpu.processes is None for gpu in seen):
            return None  # only that worker knows whether its slot runs
        state, holder = LeaseState(rows[0].ending_as), gpus.holder(rows[0])
        others = self._blameless if key in self.late else self._going_on
        held = [gpu for gpu in seen if still_held(gpu, holder, self.sighting.running, others.get(gpu.uuid, ()))]
        if len(seen) == len(uuids) and not held:
            return _Verdict(key, state, {})
        if key not in self.late:
            return None
        who = {gpu.uuid: _who_keeps(gpu, holder) for gpu in held} or dict.fromkeys(uuids, "nobody can tell")
        why = f"memory of lease {lease_name(key)} did not come back"
        return _Verdict(key, state, {uuid: f"{why}: {keeper}" for uuid, keeper in who.items()})

    @cached_property
    def _gpus(self) -> dict[str, Gpu]:
        return {gpu.uuid: gpu for gpu in self.sighting.sample}

    @cached_property
    def _going_on(self) -> dict[str, list[Holder]]:
        return self._holders_but(self.endings)

    @cached_property
    def _blameless(self) -> dict[str, list[Holder]]:
        return self._holders_but(self.late)

    def _holders_but(self, keys: Collection[str]) -> dict[str, list[Holder]]:
        """By GPU, who holds a lease other than these."""
        return gpus.holders(chain.from_iterable(rows for key, rows in self.shares.items() if key not in keys))


def _who_keeps(gpu: Gpu, holder: Holder) -> str:
    pids = [process.pid for process in gpu.processes or () if holder.owns(process)]
    return f"held by process {', '.join(map(str, pids[:5]))}" if pids else "nobody can tell"


# ── what to do ──────────────────────────────────────────────────────────────────────────────────────────────────


def _apply(conn: Connection, verdicts: Iterable[_Verdict]) -> list[str]:
    """End what is over and close what is stuck; the GPUs that are."""
    over: dict[LeaseState, list[str]] = {}
    stuck: dict[str, str] = {}
    for verdict in verdicts:
        over.setdefault(verdict.state, []).append(verdict.key)
        stuck |= verdict.stuck
    for state, keys in over.items():
        leases.free(conn, sorted(keys), state)
    for uuid, reason in sorted(stuck.items()):
        gpus.quarantine(conn, [uuid], reason)
    return sorted(stuck)
