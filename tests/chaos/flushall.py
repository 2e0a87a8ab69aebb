"""What a FLUSHALL costs: the same jobs with and without one in the middle, with default settings."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos import ledger
from tests.chaos.history import Recorder
from tests.chaos.run import prepare
from tests.chaos.sites import Sites
from tests.cluster import post
from tests.servers import MariaDB, Redis
from tests.waiting import wait_until

#: Seconds that each job takes, and jobs in one request.
JOB_S, BATCH = 0.05, 500


def measure(jobs: int, tell: Callable[[str], None]) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-flush-")))
        mariadb, redis = stack.enter_context(MariaDB()), stack.enter_context(Redis())
        prepare(mariadb, folder)
        sites = Sites(mariadb, redis, folder, Recorder())
        stack.callback(sites.close)
        sites.open(2, 2, worker_slots=8)
        jobs += jobs // 5  # some end before the last is submitted
        calm = _drain(sites, "calm", jobs, flush=False)
        tell(f"without a flush: {calm}")
        flushed = _drain(sites, "flushed", jobs, flush=True)
        tell(f"with a flush: {flushed}")
    return {
        "jobs": jobs,
        "in_flight_at_the_flush": flushed["open"],
        "seconds_without": calm["seconds"],
        "seconds_with": flushed["seconds"],
        "delay_s": round(flushed["seconds"] - calm["seconds"], 2),
        "longest_pause_without_s": calm["pause"],
        "longest_pause_with_s": flushed["pause"],
        "done": flushed["done"],
        "ok": calm["done"] == flushed["done"] == jobs,
    }


def _drain(sites: Sites, name: str, jobs: int, *, flush: bool) -> dict[str, Any]:
    """Submit all, flush, wait for the last."""
    file = sites.folder / f"{name}.jsonl"
    payload = {"seconds": JOB_S, "ledger": str(file)}
    began = time.monotonic()
    for first in range(0, jobs, BATCH):
        batch = [
            {"job_id": f"{name}-{n}", "type": "chaos.work", "payload": payload}
            for n in range(first, min(first + BATCH, jobs))
        ]
        post(sites.orchestrators[0].url, "/jobs/submit_batch", {"jobs": batch})
    open_jobs = sites.unfinished()
    if flush:
        sites.redis.flush()
    wait_until(lambda: sites.unfinished() == 0, timeout=300, what="all jobs ended")
    starts = sorted(line.mono for line in ledger.read(file) if line.event == "start")
    done = Counter(row[0] for row in sites.query(f"SELECT status FROM orchestrator_jobs WHERE job_id LIKE '{name}-%'"))
    return {
        "open": open_jobs,
        "seconds": round(starts[-1] + JOB_S - began, 2),
        "pause": round(max(after - before for before, after in pairwise(starts)), 2),
        "done": done["done"],
    }
