"""Pools whose workers Kubernetes runs: the leader tells their Deployments how many replicas they should have.

Their pods run `gpuorch worker --pool …` and follow the pool's row by themselves: they drain when it drains. So a pool
that drains keeps its replicas until it has stopped; only then are the pods taken away.
"""

from __future__ import annotations

import logging
import time

from orchestrator.crews import Plan, PoolView
from orchestrator.errors import InvalidInput, KubernetesUnavailable
from orchestrator.kubernetes import Deployment, Kubernetes
from orchestrator.leader.term import Term
from orchestrator.pools import PoolState
from orchestrator.settings import Settings

log = logging.getLogger(__name__)

#: Seconds after which a Deployment that should be as it is is looked at again.
LOOK_AGAIN_S = 10.0


class Replicas:
    """Remembers, for one term, what each Deployment was told and when."""

    def __init__(self, settings: Settings) -> None:
        self._kubernetes = Kubernetes(settings)
        self._namespace = settings.kubernetes_namespace
        self._told: dict[str, tuple[int, float]] = {}

    def follow(self, term: Term, pool: PoolView, plan: Plan) -> str | None:
        """Scale the pool's Deployment; why that cannot be done, None when it was or need not be."""
        if pool.state is PoolState.DRAINING:
            return None
        replicas, at = self._told.get(pool.pool_id, (-1, 0.0))
        if replicas == plan.workers and time.monotonic() - at < LOOK_AGAIN_S:
            return None
        try:
            deployment = Deployment.of(pool.metadata, self._namespace)
            term.write(lambda _conn: None)  # nothing but the fence: a leader that was replaced tells nobody anything
            if self._kubernetes.scale(deployment, plan.workers):
                log.info("scaled", extra={"pool_id": pool.pool_id, "replicas": plan.workers, "to": deployment.path})
        except (InvalidInput, KubernetesUnavailable) as refused:
            log.warning("cannot scale", extra={"pool_id": pool.pool_id, "error": str(refused)})
            return str(refused)[:255]
        self._told[pool.pool_id] = plan.workers, time.monotonic()
        return None
