"""The leader's look at pools: one reading of everything, one pure plan (`crews.plan`), a fenced write of each change.

A plan is made outside of any transaction and may be outdated when it is written: every write is guarded by the state
and the revision it was made for, and what it missed the next look will see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from orchestrator.crews import Plan, PoolView, plan
from orchestrator.leader.autosize import Autosize
from orchestrator.leader.replicas import Replicas
from orchestrator.leader.term import Term
from orchestrator.placement import Cluster
from orchestrator.settings import Settings
from orchestrator.store import crews, gpus

Planned = tuple[PoolView, Plan]


def reconcile_pools(term: Term, settings: Settings, replicas: Replicas, autosize: Autosize) -> list[str]:
    """The pools whose rows or assignments changed."""
    pools = term.write(crews.look)  # under the term: a leader that was replaced makes no plans
    if not pools:
        return []
    nodes = term.db.read(lambda conn: crews.node_views(conn, settings.worker_timeout_s))
    cluster = Cluster(term.db.read(lambda conn: gpus.views(conn, settings.gpu_stale_s)))
    pools, sizes = autosize.look(term, pools, Cluster(cluster.gpus()))
    planned = _provided(term, list(zip(pools, plan(pools, nodes, cluster, sizes), strict=True)), replicas)
    return [
        pool.pool_id
        for pool, decided in planned
        if decided.is_due(pool) and term.write(partial(crews.carry_out, pool=pool, plan=decided))
    ]


def _provided(term: Term, planned: Sequence[Planned], replicas: Replicas) -> list[Planned]:
    """With why Kubernetes does not give pools their workers, where it is the one to."""
    refused = replicas.follow(term, planned)
    return [(pool, replace(decided, reason=refused.get(pool.pool_id, decided.reason))) for pool, decided in planned]
