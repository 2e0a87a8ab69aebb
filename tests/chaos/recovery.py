"""From SIGKILL of a worker to the second start of its jobs, with default settings."""

import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos import ledger
from tests.chaos.history import Recorder
from tests.chaos.run import prepare
from tests.chaos.sites import Site, Sites
from tests.cluster import post
from tests.servers import MariaDB, Redis
from tests.waiting import wait_until

#: Workers of a round, each killed once, and the jobs that each one holds. A spare one has room for all of them.
WORKERS, SLOTS = 6, 2
#: The promise.
WORST_S = 15.0


class Recovered(NamedTuple):
    """From `killed`, on the monotonic clock, to the second start of `job_id`."""

    seconds: float
    killed: float
    job_id: str


def measure(kills: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Each round kills some workers in the middle of a job, at moments apart, and waits for the second starts."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-recovery-")))
        mariadb, redis = stack.enter_context(MariaDB()), stack.enter_context(Redis())
        prepare(mariadb, folder)
        sites = Sites(mariadb, redis, folder, Recorder())
        stack.callback(sites.close)
        sites.open(2, WORKERS, worker_slots=SLOTS)
        found: list[Recovered] = []
        while len(found) < kills:
            found += _round(sites, len(found))
            tell(f"{len(found)} kills; worst {max(found).seconds:.1f} s")
        worst = _told(sites, max(found))
    times = [one.seconds for one in found]
    return {
        "kills": len(times),
        "median_s": round(statistics.median(times), 2),
        "worst_s": round(max(times), 2),
        "best_s": round(min(times), 2),
        "worst_of_all": worst,
        "ok": max(times) <= WORST_S,
    }


def _round(sites: Sites, number: int) -> list[Recovered]:
    """What each kill led to; the later start when it interrupted two jobs."""
    sites.wait_healthy()
    file = sites.folder / f"ledger-{number}.jsonl"
    ids = {f"hold-{number}-{n}" for n in range(WORKERS * SLOTS)}
    jobs = [{"job_id": job_id, "type": "chaos.hold", "payload": {"ledger": str(file)}} for job_id in sorted(ids)]
    post(sites.orchestrators[0].url, "/jobs/submit_batch", {"jobs": jobs})
    wait_until(lambda: _started(file, 1).keys() == ids, timeout=60, what="every slot holds a job")
    victims = list(sites.workers)
    spare = sites.add_worker(f"spare-{number}", worker_slots=WORKERS * SLOTS)
    interrupted = [_kill(site, file) for site in victims]
    wait_until(lambda: _started(file, 2).keys() == ids, timeout=120, what="the second start of every job")
    wait_until(lambda: sites.unfinished() == 0, timeout=60, what="all jobs ended")
    sites.remove(spare)
    second = _started(file, 2)
    return [max(Recovered(second[job_id].mono - at, at, job_id) for job_id in jobs) for at, jobs in interrupted]


def _told(sites: Sites, one: Recovered) -> list[str]:
    """What happened when between the kill and the second start, by the database's clock."""
    query = f"""
        SELECT ts, event_type, worker_id FROM orchestrator_audit WHERE job_id = '{one.job_id}' OR (event_type IN
        ('worker.lost', 'leader.elected') AND ts > UTC_TIMESTAMP() - INTERVAL 1 HOUR)
    """
    killed = one.killed + time.time() - time.monotonic()
    after = [(ts.replace(tzinfo=UTC).timestamp() - killed, *rest) for ts, *rest in sites.query(query)]
    near = [item for item in after if -1.0 < item[0] < one.seconds + 1]
    return [f"{seconds:+.2f} s {event} {worker or ''}" for seconds, event, worker in near]


def _kill(site: Site, file: Path) -> tuple[float, list[str]]:
    """Kill a worker; when, and which jobs ran there."""
    holders = {line.pid: line.job_id for line in _started(file, 1).values()}
    jobs = [holders[pid] for pid in site.member.slots() if pid in holders]
    at = time.monotonic()
    site.send(signal.SIGKILL)
    time.sleep(random.uniform(0.0, 1.5))  # so that kills meet every phase of heartbeats and duties
    return at, jobs


def _started(file: Path, attempt: int) -> dict[str, ledger.Line]:
    lines = ledger.read(file)
    return {line.job_id: line for line in lines if line.event == "start" and line.attempt == attempt}
