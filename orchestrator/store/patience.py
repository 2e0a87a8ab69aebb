"""How long a job waits that found no GPU memory, and which GPUs are kept for one that has starved."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace

from sqlalchemy import Connection

from orchestrator.leases import Denied, LeaseRequest
from orchestrator.placement import Cluster, GpuView, Placed, reservation
from orchestrator.store import gpus, grants, nodes, residency
from orchestrator.store.moves import Claimant

#: Longest pause between two offers of a job that finds no GPU memory.
MAX_PATIENCE_S = 30.0
#: Pauses are so much shorter or longer than said, by chance: those who wait for the same do not come back together.
SPREAD = 0.2
#: No pause is longer, but of jobs that are too large for every GPU there is.
LONGEST_PAUSE_S = MAX_PATIENCE_S * (1 + SPREAD)
#: First and longest pause of a job that is too large for every GPU there is.
HOPELESS_S, MAX_HOPELESS_S = 60.0, 3600.0
#: Seconds until a job is offered again that fits on another node, whose worker may be quicker then.
ELSEWHERE_S = 0.25
#: Seconds for which a GPU is kept for a starving job, and until it is offered again.
RESERVED_S, RESERVED_RETRY_S = 15.0, 1.0


def pause(conn: Connection, by: Claimant, age_s: float, request: LeaseRequest, denied: Denied) -> float:
    """Seconds until a denied job is offered again: the longer it has waited, the more.

    Otherwise a crowd of jobs that do not fit would keep all others from being offered at all. One that no GPU of
    the cluster could take waits longest; a larger GPU may join one day.
    """
    if denied.evicting:
        seconds = denied.retry_after_s
    elif request.memory_mb > gpus.largest_usable_mb(conn):
        seconds = min(max(HOPELESS_S, age_s), MAX_HOPELESS_S)
    elif _fits_elsewhere(conn, by, request):
        seconds = ELSEWHERE_S
    elif age_s >= by.terms.starvation_s and _reserved(conn, by, request):
        seconds = RESERVED_RETRY_S
    else:
        seconds = min(max(denied.retry_after_s, age_s / 10), MAX_PATIENCE_S)
    return seconds * random.uniform(1 - SPREAD, 1 + SPREAD)


def _fits_elsewhere(conn: Connection, by: Claimant, request: LeaseRequest) -> bool:
    """Whether another node that serves this lane has room: a worker there should get the job soon, not later."""
    ask = replace(request, node_id=None).ask()
    choice = grants.snapshot(conn, by.terms).place(ask, by.terms.policy, by.terms.recent.mix())
    return isinstance(choice, Placed) and nodes.serves(conn, choice.gpus[0].node_id, by.pool_id)


def _reserved(conn: Connection, by: Claimant, request: LeaseRequest) -> bool:
    """Keep GPUs for a job that has starved; they take nothing else until it got its room.

    They are of one node. Whichever worker is offered the job, it goes on keeping them, while they could still hold it
    and somebody there would run it; otherwise it keeps some of its own node instead.
    """
    ask = request.ask()
    before = {uuid for uuid, key in gpus.reservations(conn).items() if key == ask.key}
    if before:
        kept = reservation(_for_reservation(conn, by, None, before), ask._replace(node_id=None))
        if kept and nodes.serves(conn, kept[0].node_id, by.pool_id):
            return gpus.reserve(conn, [view.gpu_uuid for view in kept], ask.key, RESERVED_S)
        gpus.unreserve(conn, before, ask.key)
    chosen = reservation(_for_reservation(conn, by, by.node_id), ask) or ()
    return bool(chosen) and gpus.reserve(conn, [view.gpu_uuid for view in chosen], ask.key, RESERVED_S)


def _for_reservation(
    conn: Connection, by: Claimant, node_id: str | None, uuids: Collection[str] | None = None
) -> Cluster:
    """The GPUs, or these of them, as reservations must see them."""
    views = [view for view in gpus.views(conn, by.terms.stale_s, node_id) if uuids is None or view.gpu_uuid in uuids]
    pinned = {node: residency.pinned_mb(conn, node) for node in {view.node_id for view in views}}
    return Cluster(_unmovable(view, pinned[view.node_id]) for view in views)


def _unmovable(view: GpuView, pinned: Mapping[str, int]) -> GpuView:
    """What pinned models lease does not go away, like what foreign processes hold."""
    held = pinned.get(view.gpu_uuid, 0)
    return view._replace(leased_mb=max(view.leased_mb - held, 0), foreign_mb=view.foreign_mb + held)
