"""The system itself: submit through the orchestrator, one worker process with its slots, all on real servers."""

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, text

from orchestrator.daemon import Orchestrator
from orchestrator.jobs import NewJob
from orchestrator.settings import Settings
from orchestrator.store import schema, worker_reads
from orchestrator.store.dialect import utc_now
from tests.cluster import Cluster
from tests.tables import make_tables
from tests.waiting import wait_until

BATCH = 500


class Ours:
    def __init__(self, database_url: str, redis_url: str, folder: Path, slots: int, handlers: str = "") -> None:
        self.settings = Settings(
            database_url=database_url,
            redis_url=redis_url,
            data_dir=folder,
            gpu_backend="sim:2x24576",
            worker_slots=slots,
            worker_handlers=(handlers,) if handlers else (),
            log_level="warning",
        )
        self.cluster = Cluster(self.settings, folder)
        schema.metadata.drop_all(self.cluster.db.engine)
        make_tables(self.cluster.db.engine)

    def submit(self, count: int, **fields: Any) -> tuple[float, float]:
        """Seconds to validate `count` jobs, and seconds to make them durable in batches of 500."""
        orchestrator = Orchestrator(self.settings)
        started = time.perf_counter()
        batches = [self._batch(first, fields) for first in range(0, count, BATCH)]
        validated = time.perf_counter()
        for future in [orchestrator.submit(batch) for batch in batches]:
            future.result(60)
        stored = time.perf_counter()
        orchestrator.close()
        return validated - started, stored - validated

    def _batch(self, first: int, fields: dict[str, Any]) -> list[NewJob]:
        return [
            NewJob.prepare({"type": "echo", "payload": {"n": n}} | fields, max_bytes=1 << 20, max_depth=64)
            for n in range(first, first + BATCH)
        ]

    def drain(self, count: int) -> tuple[float, float]:
        """Jobs per second once all slots are up, as the trial's are when its clock starts; and commits per job.

        By the database's clock, until the last end.
        """
        orchestrator = Orchestrator(self.settings)
        before = self._commits()
        orchestrator.start()
        worker = self.cluster._start("worker", {})
        try:
            wait_until(self._all_slots_up, timeout=60, what="all slots up")
            up_at = self.cluster.db.read(lambda conn: conn.execute(select(utc_now())).scalar_one())
            wait_until(lambda: self._done() >= count, timeout=120, what="all jobs done")
            commits = (self._commits() - before) / count
            since, last = self._done_since(up_at)
            return since / (last - up_at).total_seconds(), commits
        finally:
            worker.stop()
            orchestrator.close()

    def mean_batch(self, type: str) -> float | None:
        """Jobs to a call, as the worker's heartbeats told."""
        ((worker,), _) = self.cluster.db.read(worker_reads.page)
        mean: float | None = worker["batches"].get(type, {}).get("mean")
        return mean

    def _done(self) -> int:
        # Few looks: the benchmark must not be what it measures.
        time.sleep(0.5)
        return self.cluster.count("orchestrator_results")

    def _all_slots_up(self) -> bool:
        ready = select(func.sum(schema.workers.c.ready)).where(schema.workers.c.status == "active")
        return self.cluster.db.read(lambda conn: conn.execute(ready).scalar()) == self.settings.worker_slots

    def _done_since(self, moment: datetime) -> tuple[int, datetime]:
        """How many ended after that, and when the last did."""
        done = select(func.count(), func.max(schema.jobs.c.finished_at)).where(schema.jobs.c.finished_at > moment)
        found = self.cluster.db.read(lambda conn: conn.execute(done).one())
        return found[0], found[1]

    def _commits(self) -> int:
        query = text("SHOW GLOBAL STATUS LIKE 'Com_commit'")
        return int(self.cluster.db.read(lambda conn: conn.execute(query).one())[1])

    def close(self) -> None:
        self.cluster.close()
