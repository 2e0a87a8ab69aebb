"""Two agents with weights 1:3 on the real system: their shares of starts in every window, and when a third starts."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import select, text

from orchestrator.daemon import Orchestrator
from orchestrator.policies import AgentPolicy, Scope
from orchestrator.store import policies, schema
from tests.bench.ours import Ours
from tests.waiting import wait_until

WINDOW = 500
WEIGHTS = {"light": 1.0, "heavy": 3.0}
WANTED = WEIGHTS["heavy"] / sum(WEIGHTS.values())
#: How far a window's share may be from what it should be.
TOLERANCE = 0.05
#: Windows until the one job of somebody who comes late has started.
LATE_WINDOWS = 2


class Shares:
    def __init__(self, database_url: str, redis_url: str, folder: Path, slots: int) -> None:
        self._ours = Ours(database_url, redis_url, folder, slots)

    def measure(self, count: int) -> tuple[list[float], float]:
        """The heavy agent's share of each window in which both wait; how many windows later the third one started."""
        ours = self._ours
        for agent, weight in WEIGHTS.items():
            ours.cluster.db.write(
                partial(policies.put, scope=Scope.AGENT, name=agent, document=AgentPolicy(weight=weight))
            )
        for agent in WEIGHTS:
            ours.submit(count, agent=agent)
        orchestrator = Orchestrator(ours.settings)
        orchestrator.start()
        workers = [ours.cluster._start("worker", {}) for _ in range(2)]
        try:
            wait_until(
                lambda: ours.cluster.count("orchestrator_results") > count // 4, timeout=300, what="some are done"
            )
            late = ours._batch(0, {"agent": "late"})[:1]
            orchestrator.submit(late).result(30)
            submitted_at = self._claims()
            wait_until(lambda: self._settled(2 * count + 1), timeout=900, what="all jobs done")
        finally:
            for worker in workers:
                worker.stop()
            orchestrator.close()
        return self._judge(submitted_at, late[0].job_id)

    def _judge(self, submitted_at: int, late_id: str) -> tuple[list[float], float]:
        order = self._order()
        agents = {row.job_id: row.agent for row in self._rows(select(schema.jobs.c.job_id, schema.jobs.c.agent))}
        both = min(_last(order, agents, agent) for agent in WEIGHTS)
        shares = [
            Counter(agents[job_id] for job_id in order[first : first + WINDOW])["heavy"] / WINDOW
            for first in range(0, both - WINDOW + 1, WINDOW)
        ]
        return shares, (order.index(late_id) - submitted_at) / WINDOW

    def _order(self) -> list[str]:
        """Jobs in the order in which they were claimed; a batch of claims is one moment, and stands by rank."""
        column = schema.jobs.c
        found = self._rows(select(column.job_id).order_by(column.claimed_at, column.rank))
        return [job_id for (job_id,) in found]

    def _claims(self) -> int:
        return int(self._rows(text("SELECT COUNT(*) FROM orchestrator_jobs WHERE claimed_at IS NOT NULL"))[0][0])

    def _settled(self, count: int) -> bool:
        time.sleep(0.5)  # few looks: they are not what is measured
        return self._ours.cluster.count("orchestrator_results") >= count

    def _rows(self, query: Any) -> Sequence[Any]:
        return self._ours.cluster.db.read(lambda conn: conn.execute(query).all())

    def close(self) -> None:
        self._ours.close()


def _last(order: Sequence[str], agents: dict[str, str], agent: str) -> int:
    """Where the last job of an agent started: beyond, the others have the lane for themselves."""
    return max(place for place, job_id in enumerate(order) if agents[job_id] == agent)
