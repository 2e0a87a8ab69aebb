"""A map of very many parts on real processes, whose workers are killed meanwhile: what becomes of it."""

import random
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from orchestrator.daemon import Orchestrator
from orchestrator.jobs import NewJob
from orchestrator.settings import Settings
from orchestrator.store import schema, workflows
from orchestrator.store.database import Database
from tests.cluster import Cluster, Member
from tests.processes import children
from tests.tables import make_tables

#: A worker is killed whenever so much of it is done: while tasks are being made, in the middle, near the end.
KILLS = (0.001, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.999)
WORKERS = 2
#: No process may ever be larger.
MOST_MIB = 300.0


class Peaks:
    """The largest that each kind of process ever was, by the kernel's own high-water mark."""

    def __init__(self) -> None:
        self.mib: dict[str, float] = {}
        self._lock = threading.Lock()

    def look(self, kind: str, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        high = next((line for line in status.splitlines() if line.startswith("VmHWM")), None)
        if high is not None:
            with self._lock:
                self.mib[kind] = max(self.mib.get(kind, 0.0), int(high.split()[1]) / 1024)


class Mapping:
    """An orchestrator and workers, each a process of its own."""

    def __init__(self, database_url: str, redis_url: str, folder: Path, slots: int) -> None:
        self.folder = folder
        self.settings = Settings(
            database_url=database_url,
            redis_url=redis_url,
            data_dir=folder,
            gpu_backend="none",
            worker_slots=max(1, slots // WORKERS),
            worker_handlers=("tests.bench.map_handlers",),
            log_level="warning",
            worker_timeout_s=5.0,
            worker_heartbeat_s=1.0,
            max_crashes=100,
        )
        self.cluster = Cluster(self.settings, folder)
        make_tables(self.cluster.db.engine)
        self.peaks = Peaks()
        self.server, _ = self.cluster.serve()
        self.workers = [self._worker(n) for n in range(WORKERS)]
        self.kills = 0

    def _worker(self, number: int) -> Member:
        return self.cluster._start("worker", {"node_id": f"node-{number}"})

    def run(self, count: int, *, chunk: int = 1, kill: bool = True, timeout_s: float = 3600.0) -> dict[str, Any]:
        """Until the collector has ended; what it saw, how often it ran, what there is, and how long it took."""
        ledger = self.folder / "collected.log"
        payload = {"count": count, "chunk": chunk, "ledger": str(ledger)}
        job = NewJob.prepare({"type": "mapped", "payload": payload, "max_attempts": 100}, 1 << 20, 64)
        self._submit(job)
        started = time.monotonic()
        while not self._over(job.job_id):
            self._watch()
            time.sleep(0.25)
            if time.monotonic() - started > timeout_s:
                raise AssertionError(f"not over after {timeout_s} s: {self._flow(job.job_id)}")
            if kill and self.kills < len(KILLS) and self._done(job.job_id) >= KILLS[self.kills] * count:
                self._kill()
        seconds = time.monotonic() - started
        self._watch()
        return self._found(job.job_id, ledger) | {"seconds": seconds}

    def _submit(self, job: NewJob) -> None:
        # Not started: the server is another process.
        orchestrator = Orchestrator(self.settings)
        orchestrator.submit([job]).result(30)
        orchestrator.close()

    def _kill(self) -> None:
        number = random.randrange(WORKERS)
        self.workers[number].kill()
        self.kills += 1
        self.workers[number] = self._worker(number)

    def _watch(self) -> None:
        self.peaks.look("orchestrator", self.server.process.pid)
        for worker in self.workers:
            self.peaks.look("worker: supervisor", worker.process.pid)
            for nursery in children(worker.process.pid):
                self.peaks.look("worker: nursery", nursery)
                for slot in children(nursery):
                    self.peaks.look("worker: slot", slot)

    def _flow(self, job_id: str) -> dict[str, Any] | None:
        def look(conn: Any) -> dict[str, Any] | None:
            workflow_id = conn.execute(select(schema.jobs.c.workflow_id).where(schema.jobs.c.job_id == job_id)).scalar()
            return workflows.get(conn, workflow_id, 1) if workflow_id else None

        return self.db.read(look)

    def _done(self, job_id: str) -> int:
        flow = self._flow(job_id)
        return flow["progress"]["done"] if flow else 0

    @property
    def db(self) -> Database:
        return self.cluster.db

    def _over(self, job_id: str) -> bool:
        flow = self._flow(job_id)
        return flow is not None and flow["status"] != "running"

    def _found(self, job_id: str, ledger: Path) -> dict[str, Any]:
        flow = self._flow(job_id)
        assert flow is not None

        def look(conn: Any) -> tuple[Any, Any]:
            jobs = schema.jobs
            kinds = conn.execute(select(jobs.c.type, jobs.c.status, func.count()).group_by(jobs.c.type, jobs.c.status))
            collector = select(schema.results.c.result).join(jobs, jobs.c.job_id == schema.results.c.job_id)
            return [tuple(row) for row in kinds], conn.execute(
                collector.where(jobs.c.type == "collect")
            ).scalars().all()

        kinds, results = self.db.read(look)
        return {"flow": flow, "kinds": kinds, "results": results, "runs": len(ledger.read_text().splitlines())}

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.server.stop()
        self.cluster.close()


def wrong_with(found: dict[str, Any], count: int, peaks: Peaks) -> list[str]:
    """What is not as it must be: nothing twice, nothing missing, all results in order, no process too large."""
    flow, kinds = found["flow"], sorted(found["kinds"])
    checks = {
        f"the workflow is {flow['status']}: {flow['reason']}": flow["status"] == "done",
        f"progress is {flow['progress']}": flow["progress"]["done"] == flow["progress"]["total"] == count + 2,
        f"jobs are {kinds}": kinds == [("collect", "done", 1), ("mapped", "done", 1), ("part", "done", count)],
        f"collected: {found['results']}": found["results"] == [f'{{"seen":{count},"wrong":0}}'],
        f"processes grew to {peaks.mib} MiB": max(peaks.mib.values()) < MOST_MIB,
    }
    return [told for told, fine in checks.items() if not fine]
