"""The leader's look at pools: one reading of everything, one pure plan (`crews.plan`), a fenced write of each change.

A plan is made outside of any transaction and may be outdated when it is written: every write is guarded by the state
and the revision it was made for, and what it missed the next look will see.
"""

from __future__ import annotations

from functools import partial

from orchestrator.crews import plan
from orchestrator.leader.term import Term
from orchestrator.placement import Cluster
from orchestrator.settings import Settings
from orchestrator.store import crews, gpus


def reconcile_pools(term: Term, settings: Settings) -> list[str]:
    """The pools whose rows or assignments changed."""
    pools = term.db.read(crews.look)
    if not pools:
        return []
    nodes = term.db.read(lambda conn: crews.node_views(conn, settings.worker_timeout_s))
    cluster = Cluster(term.db.read(lambda conn: gpus.views(conn, settings.gpu_stale_s)))
    plans = plan(pools, nodes, cluster)
    return [
        pool.pool_id
        for pool, decided in zip(pools, plans, strict=True)
        if decided.is_due(pool) and term.write(partial(crews.carry_out, pool=pool, plan=decided))
    ]
