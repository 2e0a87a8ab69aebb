"""The leader's look at pools: one reading of everything, one pure plan (`crews.plan`), a fenced write of each change.

A plan is made outside of any transaction and may be outdated when it is written: every write is guarded by the state
and the revision it was made for, and what it missed the next look will see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from orchestrator.crews import Plan, PoolView, plan
from orchestrator.leader.autosize import Autosize
from orchestrator.leader.replicas import Replicas
from orchestrator.leader.term import Term
from orchestrator.placement import Cluster
from orchestrator.settings import Settings
from orchestrator.store import crews, gpus


def reconcile_pools(term: Term, settings: Settings, replicas: Replicas, autosize: Autosize) -> list[str]:
    """The pools whose rows or assignments changed."""
    pools = term.write(crews.look)  # under the term: a leader that was replaced makes no plans
    if not pools:
        return []
    nodes = term.db.read(lambda conn: crews.node_views(conn, settings.worker_timeout_s))
    cluster = Cluster(term.db.read(lambda conn: gpus.views(conn, settings.gpu_stale_s)))
    pools, sizes = autosize.look(term, pools, Cluster(cluster.gpus()))
    planned = _pairs(pools, plan(pools, nodes, cluster, sizes))
    plans = [_provided(term, pool, decided, replicas) for pool, decided in planned]
    return [
        pool.pool_id
        for pool, decided in _pairs(pools, plans)
        if decided.is_due(pool) and term.write(partial(crews.carry_out, pool=pool, plan=decided))
    ]


def _pairs(pools: Sequence[PoolView], plans: Sequence[Plan]) -> Iterable[tuple[PoolView, Plan]]:
    return zip(pools, plans, strict=True)


def _provided(term: Term, pool: PoolView, decided: Plan, replicas: Replicas) -> Plan:
    """With why Kubernetes does not give the pool its workers, where it is the one to."""
    refused = replicas.follow(term, pool, decided) if pool.provider == "kubernetes" else None
    return replace(decided, reason=refused) if refused else decided
