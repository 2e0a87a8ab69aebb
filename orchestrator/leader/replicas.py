"""Pools whose workers Kubernetes runs: the leader tells their Deployments how many replicas they should have.

Their pods run `gpuorch worker --pool …` and follow the pool's row by themselves: they drain when it drains. So a pool
that drains keeps its replicas until it has stopped; only then are the pods taken away.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from orchestrator.backoff import doubled
from orchestrator.crews import Plan, PoolView
from orchestrator.errors import InvalidInput, KubernetesUnavailable
from orchestrator.kubernetes import Deployment, Kubernetes
from orchestrator.leader.term import Term
from orchestrator.pools import PoolState
from orchestrator.settings import Settings

log = logging.getLogger(__name__)

#: Seconds after which a Deployment that should be as it is is looked at again.
LOOK_AGAIN_S = 10.0
#: Seconds that make an answer slow: no other is asked for in that look, since all of the leader's duties wait.
SLOW_S = 1.0
#: Seconds for which an API that did not answer is left alone: twice as many each time, up to the last.
FIRST_REST_S, LONGEST_REST_S = 2.0, 60.0


class Replicas:
    """Remembers, for one term, what each Deployment was told and when, and how the API fares."""

    def __init__(self, settings: Settings) -> None:
        self._kubernetes = Kubernetes(settings)
        self._namespace = settings.kubernetes_namespace
        self._told: dict[str, tuple[int, float]] = {}
        self._asked: dict[str, float] = {}
        #: Why pools could not be scaled: each for itself, and all of them.
        self._refusals: dict[str, str] = {}
        self._trouble: str | None = None
        self._doublings, self._rest_until = 0, -math.inf

    def follow(self, term: Term, planned: Iterable[tuple[PoolView, Plan]]) -> dict[str, str]:
        """Scale the Deployments of these pools; by pool, why that cannot be done."""
        due = [(pool, plan) for pool, plan in planned if self._is_due(pool, plan)]
        # Whoever waits longest comes first: one Deployment that hangs must not take every turn.
        for pool, plan in sorted(due, key=lambda pair: self._asked.get(pair[0].pool_id, 0.0)):
            began = time.monotonic()
            if began < self._rest_until:
                break
            self._asked[pool.pool_id] = began
            self._tell(term, pool, plan)
            if time.monotonic() - began >= SLOW_S:
                break
        refused = {pool.pool_id: self._why_not(pool.pool_id) for pool, plan in due if self._is_due(pool, plan)}
        return {pool_id: why for pool_id, why in refused.items() if why}

    def _is_due(self, pool: PoolView, plan: Plan) -> bool:
        if pool.provider != "kubernetes" or pool.state is PoolState.DRAINING:
            return False
        replicas, at = self._told.get(pool.pool_id, (-1, 0.0))
        return replicas != plan.workers or time.monotonic() - at >= LOOK_AGAIN_S

    def _why_not(self, pool_id: str) -> str | None:
        return self._refusals.get(pool_id) or self._trouble

    def _tell(self, term: Term, pool: PoolView, plan: Plan) -> None:
        self._refusals.pop(pool.pool_id, None)
        try:
            deployment = Deployment.of(pool.metadata, self._namespace)
            term.write(lambda _conn: None)  # nothing but the fence: a leader that was replaced tells nobody anything
            if self._kubernetes.scale(deployment, plan.workers):
                log.info("scaled", extra={"pool_id": pool.pool_id, "workers": plan.workers, "path": deployment.path})
            self._told[pool.pool_id] = plan.workers, time.monotonic()
            self._trouble = None
        except (InvalidInput, KubernetesUnavailable) as refused:
            log.warning("cannot scale", extra={"pool_id": pool.pool_id, "error": str(refused)})
            self._note(pool.pool_id, refused)

    def _note(self, pool_id: str, refused: InvalidInput | KubernetesUnavailable) -> None:
        why = str(refused)[:255]
        if isinstance(refused, InvalidInput):
            self._refusals[pool_id] = why
        elif refused.answered:
            self._refusals[pool_id], self._trouble = why, None
        else:
            self._trouble = why
            self._rest()

    def _rest(self) -> None:
        now = time.monotonic()
        was_well = now - self._rest_until > LONGEST_REST_S
        self._doublings = 0 if was_well else self._doublings + 1
        self._rest_until = now + doubled(FIRST_REST_S, self._doublings, LONGEST_REST_S)
