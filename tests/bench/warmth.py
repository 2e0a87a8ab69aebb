"""How long a first result takes: from a pool that does not exist yet, from one that is cold, from one that is warm."""

import time
from pathlib import Path
from typing import Any

from orchestrator.daemon import Orchestrator
from orchestrator.jobs import NewJob
from orchestrator.pools import PoolSpec
from orchestrator.settings import Settings
from orchestrator.store import job_reads, pools, schema
from tests.cluster import Cluster
from tests.tables import make_tables
from tests.waiting import wait_until

#: Seconds that the model takes to load: what is measured beside it is ours.
LOAD_S = 0.2

HANDLERS = f"""
import time
from contextlib import ExitStack
from orchestrator.gpu import simulated
from worker import handler

@handler("answer", min_memory_mb=4000)
class Answer:
    def load(self, ctx):
        time.sleep({LOAD_S})
        self.memory = ExitStack()
        self.memory.enter_context(simulated.allocated(ctx.device, 3000))

    def run(self, ctx, payload):
        return {{}}
"""


class Warmth:
    def __init__(self, database_url: str, redis_url: str, folder: Path) -> None:
        (folder / "bench_models.py").write_text(HANDLERS)
        settings = Settings(
            database_url=database_url,
            redis_url=redis_url,
            data_dir=folder,
            gpu_backend="sim:2x24576",
            worker_handlers=("bench_models",),
            worker_slots=1,
            log_level="warning",
        )
        self._cluster = Cluster(settings, folder)
        schema.metadata.drop_all(self._cluster.db.engine)
        make_tables(self._cluster.db.engine)
        self._orchestrator = Orchestrator(settings)
        self._orchestrator.start()
        self._cluster._start("worker", {}, str(folder))
        wait_until(lambda: self._cluster.count("workers"), timeout=60, what="a worker")

    def measure(self, warm: int = 50) -> dict[str, list[float]]:
        """Seconds to a result, by what was there before."""
        new = self._first("fresh", hold_seconds=1)
        self._wait_for_none("fresh")
        cold = self._result("fresh")
        self._wait_for_none("fresh")
        self._first("kept", hold_seconds=3600)
        return {"new pool": [new], "cold pool": [cold], "warm pool": [self._result("kept") for _ in range(warm)]}

    def _first(self, pool_id: str, **fields: Any) -> float:
        started = time.perf_counter()
        spec = PoolSpec(pool_id=pool_id, type="answer", **fields)
        self._cluster.db.write(lambda conn: pools.create(conn, spec))
        self._orchestrator.hub.ask_for_pools(pool_id)
        self._result(pool_id)
        return time.perf_counter() - started

    def _result(self, pool_id: str) -> float:
        """From handing a job in to reading that it is done, as a client of the database would see it."""
        started = time.perf_counter()
        job = NewJob.prepare({"type": "answer", "payload": {}, "pool_id": pool_id}, max_bytes=1 << 20, max_depth=64)
        self._orchestrator.submit([job]).result(30)
        wait_until(lambda: self._status(job.job_id) == "done", timeout=60, what="a result")
        return time.perf_counter() - started

    def _status(self, job_id: str) -> str:
        return self._cluster.db.read(lambda conn: job_reads.status(conn, job_id))

    def _wait_for_none(self, pool_id: str) -> None:
        def gone() -> bool:
            return not self._cluster.db.read(lambda conn: pools.get(conn, pool_id))["workers"]

        wait_until(gone, timeout=60, what="the pool is cold")

    def close(self) -> None:
        self._cluster.close()
        self._orchestrator.close()
