"""Jobs under caps on real processes: how long they take beside what the caps allow, and what their handlers saw."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from orchestrator.daemon import Orchestrator
from orchestrator.jobs import NewJob
from orchestrator.policies import Scope, parse
from orchestrator.settings import Settings
from orchestrator.store import policies, schema
from tests.cluster import Cluster
from tests.factories import rows
from tests.tables import make_tables
from tests.waiting import wait_until

CAPS = {"agent": 2, "host": 1}
#: Each agent works with hosts of its own: as many as it may use at once, and one more.
AGENTS, HOSTS = 4, 3


def body(number: int, ledger: Path, seconds: float) -> dict[str, object]:
    agent = f"agent:{number % AGENTS}"
    host = f"host:{number % AGENTS}-{number // AGENTS % HOSTS}"
    return {
        "type": "counted",
        "payload": {"ledger": str(ledger), "seconds": seconds, "keys": [agent, host]},
        "agent": agent.partition(":")[2],
        "concurrency_keys": [host],
    }


def least_seconds(count: int, seconds: float) -> float:
    """What the caps allow at best: each agent's jobs, so many at a time."""
    return -(-count // AGENTS) / CAPS["agent"] * seconds


def most_at_once(ledger: Path) -> Counter[str]:
    """By key, how many jobs the handlers ever saw running together."""
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for line in sorted(ledger.read_text().splitlines(), key=lambda line: float(line.split()[0])):
        _, sign, *keys = line.split()
        for key in keys:
            now[key] += 1 if sign == "+" else -1
            most[key] = max(most[key], now[key])
    return most


def seconds_taken(ledger: Path) -> float:
    times = [float(line.split()[0]) for line in ledger.read_text().splitlines()]
    return max(times) - min(times)


class Capped:
    """An orchestrator in this process and a worker with eight slots in another, under these caps of kinds.

    Unless it `leads`, nobody does.
    """

    def __init__(self, settings: Settings, folder: Path, most: Mapping[str, int] = CAPS, *, leads: bool = True) -> None:
        given = settings.model_copy(update={"worker_slots": 8, "worker_handlers": ("tests.bench.capped_handlers",)})
        self.ledger = folder / "counted.log"
        self._cluster = Cluster(given, folder)
        make_tables(self._cluster.db.engine)
        for kind, seats in most.items():
            cap = parse(Scope.CONCURRENCY, {"max": seats})
            put = partial(policies.put, scope=Scope.CONCURRENCY, name=f"{kind}:*", document=cap)
            self._cluster.db.write(put)
        self._orchestrator = Orchestrator(given)
        if leads:
            self._orchestrator.start()
        self._worker = self._cluster._start("worker", {})
        self._worker.says("worker ready")

    def run(self, count: int, seconds: float, timeout_s: float) -> None:
        """Until all have ended, and no key is held."""
        bodies = [body(number, self.ledger, seconds) for number in range(count)]
        batch = [NewJob.prepare(one, max_bytes=1 << 20, max_depth=64) for one in bodies]
        self._orchestrator.submit(batch).result(30)
        wait_until(lambda: not self._cluster.unfinished(), timeout=timeout_s, what="all jobs ended")
        wait_until(lambda: not self.held(), timeout=10, what="no key is held")

    def held(self) -> dict[str, int]:
        return {row.cap_key: row.in_use for row in rows(self._cluster.db, schema.concurrency_caps) if row.in_use}

    def close(self) -> None:
        self._worker.stop()
        self._cluster.close()
        self._orchestrator.close()
