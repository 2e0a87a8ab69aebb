"""What a scrape of a real server costs with a thousand jobs waiting and with a million.

There are 50 lanes, 500 workers and 200 GPUs; and as many job types as have labels of their own, with all their totals.
"""

import statistics
import time
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import Connection, text

from orchestrator import tallies
from orchestrator.settings import Settings
from orchestrator.store import schema
from tests.bench.publish import PORTION
from tests.cluster import Cluster
from tests.conftest import empty
from tests.tables import make_tables

BACKLOGS = (1_000, 1_000_000)
LANES, WORKERS, GPUS = 50, 500, 200
#: Scrapes of each backlog, seconds between them (ten Prometheus servers would ask so often), and what is promised.
SCRAPES, PAUSE_S, PROMISED_S = 200, 0.1, 0.1

_TIMES = (*tallies.BUCKETS, tallies.SUM)
TOTALS: dict[str, tuple[str, ...]] = {tallies.SUBMITS: ("",), tallies.FINISHES: tallies.STATUSES}
TOTALS |= dict.fromkeys((tallies.LATENCY, tallies.WAIT, tallies.RUN), _TIMES)

_JOBS = text("""
INSERT INTO orchestrator_jobs
  (job_id, type, payload, payload_hash, agent, lane, `rank`, max_attempts, queued, not_before, blocked_on, created_at)
SELECT CONCAT('waits-', LPAD(seq, 8, '0')), CONCAT('type-', seq % 200), '{}', REPEAT('0', 64),
       CONCAT('agent-', seq % 50),
       CONCAT('lane-', LPAD(seq % :lanes, 2, '0')), seq * 1000, 5,
       CASE seq % 20 WHEN 0 THEN 'delayed' WHEN 1 THEN 'blocked' ELSE 'ready' END,
       IF(seq % 20 = 0, utc_timestamp(6) + INTERVAL 9 DAY, NULL), IF(seq % 20 = 1, 'quiet', NULL),
       utc_timestamp(6) - INTERVAL (seq % 3600) SECOND
FROM seq_1_to_1000000 WHERE seq BETWEEN :first AND :last
""")


def _insert(conn: Connection, given: dict[str, int]) -> None:
    conn.execute(_JOBS, given)


class Scrape:
    def __init__(self, database_url: str, redis_url: str, folder: Path) -> None:
        # Nobody takes a job, and no worker becomes lost, while it is measured.
        settings = Settings(
            database_url=database_url,
            redis_url=redis_url,
            data_dir=folder,
            log_level="warning",
            db_timeout_s=60,
            worker_timeout_s=86_400,
            gpu_stale_s=86_400,
        )
        self._cluster = Cluster(settings, folder)
        make_tables(self._cluster.db.engine)
        empty(self._cluster.db)
        self._prepare()
        _, url = self._cluster.serve()
        # By hand: a library's client would be a good part of what is measured.
        self._http = HTTPConnection(urlsplit(url).netloc, timeout=60)

    def _prepare(self) -> None:
        lanes = [f"lane-{n:02}" for n in range(LANES)]
        workers = [
            {
                "worker_id": f"node-{n // 5}:1:{n:08}",
                "node_id": f"node-{n // 5}",
                "pool_id": lanes[n % LANES],
                "hostname": "h",
                "pid": 1,
                "slots": 4,
                "types": "[]",
            }
            for n in range(WORKERS)
        ]
        gpus: list[dict[str, Any]] = [
            {"gpu_uuid": f"GPU-{n}", "node_id": f"node-{n // 2}", "gpu_index": n % 2, "name": "g"}
            | {"total_mb": 24_576, "usable_mb": 22_000}
            for n in range(GPUS)
        ]
        db = self._cluster.db
        db.write(lambda conn: conn.execute(schema.lanes.insert(), [{"lane": lane} for lane in lanes]))
        db.write(lambda conn: conn.execute(schema.workers.insert(), workers))
        db.write(lambda conn: conn.execute(schema.gpus.insert(), gpus))
        totals = [
            {"name": name, "type": f"type-{n}", "label": label, "value": 1.0}
            for n in range(tallies.MAX_TYPES)
            for name, labels in TOTALS.items()
            for label in labels
        ]
        db.write(lambda conn: conn.execute(schema.tallies.insert(), totals))

    def measure(self) -> dict[str, float]:
        figures = {}
        waiting = 0
        for count in BACKLOGS:
            for first in range(waiting + 1, count + 1, PORTION):
                given = {"lanes": LANES, "first": first, "last": min(first + PORTION - 1, count)}
                self._cluster.db.write(partial(_insert, given=given))
            waiting = count
            self._cluster.db.read(lambda conn: conn.execute(text("ANALYZE TABLE orchestrator_jobs")).all())
            self._wait_until_shown(count)
            times: dict[str, list[float]] = {"/metrics": [], "/livez": []}
            for _ in range(SCRAPES):
                for path, taken in times.items():  # in turns: the second says what the machine is busy with
                    taken.append(self._timed(path))
            for path, label in (("/metrics", ""), ("/livez", "/livez, ")):
                figures[f"{count:,} pending: {label}p50 ms"] = 1000 * statistics.median(times[path])
                figures[f"{count:,} pending: {label}p99 ms"] = 1000 * statistics.quantiles(times[path], n=100)[98]
            figures[f"{count:,} pending: KiB"] = len(self._get("/metrics")) / 1024
        return figures

    def _wait_until_shown(self, count: int) -> None:
        """What is measured shows this backlog, not the one before."""
        self._http.close()  # idle for minutes: the server has closed it, and the next request opens another
        deadline = time.monotonic() + 120
        while self._shown() != count:
            assert time.monotonic() < deadline, f"{self._shown()} of {count} jobs are shown"
            time.sleep(0.5)

    def _shown(self) -> int:
        names = ("job_queue_depth", "jobs_delayed", "jobs_blocked")
        starts = tuple(f"gpu_orchestrator_{name}{{" for name in names)
        lines = [line for line in self._get("/metrics").decode().splitlines() if line.startswith(starts)]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))

    def _timed(self, path: str) -> float:
        time.sleep(PAUSE_S / 2)
        started = time.perf_counter()
        self._get(path)
        return time.perf_counter() - started

    def _get(self, path: str) -> bytes:
        self._http.request("GET", path)
        answer = self._http.getresponse()
        assert answer.status == 200, answer.status
        return answer.read()

    def close(self) -> None:
        self._http.close()
        self._cluster.close()
