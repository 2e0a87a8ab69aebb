"""Two orchestrators and two workers as real processes on MariaDB and Redis: the whole way of a job, many times."""

import secrets
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from orchestrator.settings import Settings
from orchestrator.store import schema
from orchestrator.stream.hub import Hub
from tests.cluster import Cluster, post
from tests.plain import http
from tests.tables import make_tables
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

JOBS, BATCH = 10_000, 500


@pytest.fixture
def cluster(mariadb, redis_server, tmp_path: Path) -> Iterator[Cluster]:
    """Default settings on a database of the test's own."""
    redis_server.flush()
    given = Settings(
        database_url=mariadb.create_database(f"e2e_{secrets.token_hex(4)}"),
        redis_url=redis_server.url,
        data_dir=tmp_path,
        gpu_backend="sim:2x24576",
        worker_slots=8,
    )
    opened = Cluster(given, tmp_path, forked=True)
    make_tables(opened.db.engine)
    yield opened
    opened.close()


@pytest.mark.timeout(240)
def test_ten_thousand_jobs_each_done_exactly_once(cluster):
    (_, first), (_, second) = cluster.serve(), cluster.serve()
    for name in ("node-1", "node-2"):
        cluster.worker(node_id=name)
    for number in range(JOBS // BATCH):
        # Some with a lease, some without, some mixed: each is claimed in its own way.
        memory_mb = {0: (100, 100), 1: (0, 100)}.get(number % 5, (0, 0))
        jobs = [
            {"job_id": f"job-{number}-{n}", "type": "echo", "payload": {"n": n}, "min_memory_mb": memory_mb[n % 2]}
            for n in range(BATCH)
        ]
        answer = post((first, second)[number % 2], "/jobs/submit_batch", {"jobs": jobs})
        assert (answer["created"], answer["refused"]) == (BATCH, 0)
    wait_until(lambda: cluster.unfinished() == 0, timeout=180, what="all jobs done")

    assert cluster.count("orchestrator_jobs", schema.jobs.c.status == "done", schema.jobs.c.attempts == 1) == JOBS
    assert cluster.count("orchestrator_results") == JOBS
    assert wrong_trails(cluster) == {}
    assert len(workers_that_took_part(cluster)) == 2
    hub = Hub(cluster.settings)
    wait_until(lambda: hub.lane("default").length() == 0, what="an empty stream")
    hub.close()
    wait_until(lambda: cluster.count("orchestrator_leases") == 0, timeout=30, what="no lease left")
    leased = cluster.db.read(lambda conn: list(conn.execute(select(schema.gpus.c.leased_mb)).scalars()))
    assert leased == [0, 0, 0, 0]
    assert http.get(f"{first}/jobs/job-0-7/result").json()["result"] == {"n": 7}


def wrong_trails(cluster: Cluster) -> dict[str, Counter[str]]:
    """Jobs whose audit does not say: submitted and done once, claimed once more than handed back.

    Who was claimed ahead and found no slot in time is handed back; short jobs may have been seen running.
    """
    events = (
        select(schema.audit.c.job_id, schema.audit.c.event_type, func.count())
        .where(schema.audit.c.job_id.is_not(None), schema.audit.c.event_type != "job.running")
        .group_by(schema.audit.c.job_id, schema.audit.c.event_type)
    )
    trails: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for job_id, event_type, times in cluster.db.read(lambda conn: conn.execute(events).all()):
        trails[job_id][event_type] = times
    query = select(schema.jobs.c.job_id, schema.jobs.c.attempt)
    attempts = {row.job_id: row.attempt for row in cluster.db.read(lambda conn: conn.execute(query).all())}
    assert trails.keys() == attempts.keys() and sum(attempts.values()) < 2 * JOBS
    return {job_id: trails[job_id] for job_id, attempt in attempts.items() if trails[job_id] != right_trail(attempt)}


def right_trail(attempt: int) -> Counter[str]:
    return Counter({"job.submitted": 1, "job.done": 1, "job.claimed": attempt, "job.handed_back": attempt - 1})


def workers_that_took_part(cluster: Cluster) -> list[str]:
    return cluster.db.read(lambda conn: list(conn.execute(select(schema.jobs.c.worker_id).distinct()).scalars()))


def test_a_killed_leader_is_followed_within_three_seconds_under_a_higher_epoch(cluster):
    members = dict([cluster.serve()[::-1], cluster.serve()[::-1]])
    url, other = members

    def leader(of: str) -> dict:
        return http.get(f"{of}/control/leader").json()

    before = wait_until(lambda: (found := leader(url))["alive"] and found, what="a leader")
    leads = url if before["holder"] == leader(url)["self"] else other
    follows = other if leads == url else url
    members[leads].kill()
    killed = time.monotonic()
    after = wait_until(lambda: (found := leader(follows))["holder"] == found["self"] and found, what="a new leader")
    assert time.monotonic() - killed < 3
    assert after["epoch"] > before["epoch"]


def test_sigterm_in_the_middle_of_a_job_hands_it_back_uncharged(cluster):
    _, url = cluster.serve()
    first = cluster.worker(worker_grace_s=0.2)
    post(url, "/jobs/submit", {"job_id": "long", "type": "sleep", "payload": {"seconds": 600}})
    before = cluster.wait_for("long", "running")["worker_id"]
    cluster.worker()
    first.send(signal.SIGTERM)
    stopped = time.monotonic()
    wait_until(lambda: cluster.job("long")["worker_id"] not in (None, before), what="another worker")
    assert time.monotonic() - stopped < 3
    record = cluster.wait_for("long", "running")
    assert (record["attempt"], record["attempts"]) == (2, 1)
    assert first.process.wait(20) == 0
