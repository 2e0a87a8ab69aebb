"""Two thousand jobs of every fate on a cluster of real processes, and what else a metric may tell of."""

import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text

from orchestrator.children import dying_with_parent
from orchestrator.jobs import TERMINAL
from orchestrator.store import schema
from tests.cluster import Cluster, Member, post
from tests.plain import http
from tests.servers import Redis, find_binary
from tests.waiting import wait_until

HANDLERS = Path(__file__).parent
BATCH = 200
#: The pool whose only worker is killed, so that its jobs are taken back; what is left of them waits.
DOOMED = "doomed"
#: Submits of an agent that may have five.
GREEDY, ALLOWED = 12, 5
GREEDY_REFUSED = GREEDY - ALLOWED
#: Two thousand, and those with a story of their own.
JOBS = 2000 + 1 + 4 + 3 + ALLOWED + 20

Body = dict[str, Any]


def job(job_id: str, type: str, payload: Body | None = None, **more: Any) -> Body:
    return {"job_id": job_id, "type": type, "payload": payload or {}, **more}


def two_thousand() -> list[Body]:
    """Fates in turn, so that every batch has some of each."""
    kinds = [
        (1330, lambda n: job(f"echo-{n}", "echo", min_memory_mb=100 if n % 2 else 0)),
        (150, lambda n: job(f"gather-{n}", "gather")),
        (100, lambda n: job(f"sleep-{n}", "sleep", {"seconds": 0.02})),
        (20, lambda n: job(f"allocate-{n}", "allocate", {"memory_mb": 512, "seconds": 0.02})),
        (150, lambda n: job(f"again-{n}", "fail", {"times": 1}, retry_base_sec=0.1)),
        (50, lambda n: job(f"later-{n}", "fail", {"kind": "retry", "times": 1, "after": 0.1})),
        (100, lambda n: job(f"never-{n}", "fail", {"kind": "permanent"})),
        (40, lambda n: job(f"skip-{n}", "fail", {"kind": "skip"})),
        (40, lambda n: job(f"given-up-{n}", "fail", {}, max_attempts=1)),
        (4, lambda n: job(f"crash-{n}", "crash", max_attempts=1)),
        (6, lambda n: job(f"slow-{n}", "sleep", {"seconds": 600}, max_runtime_sec=0.3, max_attempts=1)),
        (10, lambda n: job(f"tomorrow-{n}", "echo", earliest_start_at=_tomorrow())),
    ]
    jobs = [make(n) for count, make in kinds for n in range(count)]
    assert len(jobs) == 2000
    return [jobs[(n * 7) % 2000] for n in range(2000)]


def _tomorrow() -> str:
    return f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%dT%H:%M:%SZ}"


class Load:
    """What happens to a cluster, in the order in which a test lets it."""

    def __init__(self, cluster: Cluster, redis: Redis, urls: list[str]) -> None:
        self.cluster, self.redis, self.urls = cluster, redis, urls
        #: What was said to those who asked for a lease.
        self.lease_answers: Counter[str] = Counter()
        self._client: subprocess.Popen[bytes] | None = None

    def run(self, serving: list[Member], *, seen: Callable[[], object]) -> None:
        """`seen` tells whether somebody has looked at what ended so far."""
        self.start_workers()
        self.submit_all()
        self.make_pools()
        self.lose_redis(serving)
        self.lose_a_worker()
        self.fill_a_cap()
        self.ask_for_leases()
        self.submit_too_much()
        self.finish()
        wait_until(seen, what="a look at the first ends")
        self.change_minds()
        self.finish()
        self.break_a_gpu()

    def start_workers(self) -> None:
        for node in ("node-1", "node-2"):
            self._worker(node_id=node)

    def _worker(self, **given: Any) -> Member:
        return self.cluster.worker(path=str(HANDLERS), worker_handlers=("telemetry_handlers",), **given)

    def submit_all(self) -> None:
        jobs = two_thousand()
        for start in range(0, len(jobs), BATCH):
            answer = post(self.urls[start // BATCH % 2], "/jobs/submit_batch", {"jobs": jobs[start : start + BATCH]})
            assert (answer["created"], answer["refused"]) == (BATCH, 0)

    def lose_redis(self, serving: list[Member]) -> None:
        """Long enough for duties to fail; jobs that are under way go on."""
        self.redis.kill()
        wait_until(lambda: any("duty failed" in member.log.read_text() for member in serving), what="a failed duty")
        self.redis.start()

    def make_pools(self) -> None:
        # A pool that is made before both nodes have told their handlers has all its workers on one.
        able = "SELECT COUNT(*) FROM nodes WHERE supervisor_types LIKE '%echo%'"
        wait_until(lambda: self._one(able) == 2, what="two nodes that can run it")
        post(self.urls[0], "/workers/pool", {"pool_id": "warm", "type": "echo", "desired_workers": 2})
        post(self.urls[0], "/workers/pool", {"pool_id": "cold", "type": "nobody-has-this"})
        post(self.urls[0], "/workers/pool", {"pool_id": "closed", "type": "echo"})
        post(self.urls[0], "/control/evict_pool", {"pool_id": "closed"})
        post(self.urls[1], "/jobs/submit", job("in-the-pool", "echo", pool_id="warm"))
        self.cluster.wait_for("in-the-pool", "done")
        alive = "SELECT COUNT(*) FROM workers WHERE pool_id = 'warm' AND status = 'active'"
        wait_until(lambda: self._one(alive) == 2, what="both workers of a pool")
        states = "SELECT COUNT(*) FROM worker_pools WHERE status IN ('running', 'starting', 'evicted')"
        wait_until(lambda: self._one(states) == 3, what="pools that run, start and are gone")

    def fill_a_cap(self) -> None:
        """One runs until the test's end, the others wait for it."""
        self._put("/policies/concurrency/host:one", {"max": 1})
        for n in range(4):
            post(
                self.urls[n % 2],
                "/jobs/submit",
                job(f"capped-{n}", "sleep", {"seconds": 600}, concurrency_keys=["host:one"]),
            )
            self.cluster.wait_for("capped-0", "running")
        wait_until(lambda: self.count("queued = 'blocked'") == 3, what="three that wait for the cap")

    def lose_a_worker(self) -> None:
        """Of its three jobs one is tried again, one is given up, one was to be cancelled anyway."""
        doomed = self._worker(node_id="node-3", worker_pool=DOOMED, gpu_backend="none")
        ids = ("lost-again", "lost-given-up", "lost-cancelled")
        for job_id in ids:
            attempts = {"max_attempts": 1} if job_id == "lost-given-up" else {}
            post(self.urls[0], "/jobs/submit", job(job_id, "sleep", {"seconds": 600}, pool_id=DOOMED, **attempts))
        for job_id in ids:
            self.cluster.wait_for(job_id, "running")
        doomed.send(signal.SIGSTOP)
        post(self.urls[1], "/jobs/lost-cancelled/cancel", {})
        doomed.kill()
        self.cluster.wait_for("lost-given-up", "dead_letter")
        self.cluster.wait_for("lost-cancelled", "cancelled")
        self.cluster.wait_for("lost-again", "pending")

    def ask_for_leases(self) -> None:
        """Held until the end: one GPU each on two nodes, one that is a CPU's; and two that nobody can have."""
        wanted: list[Body] = [
            {"min_memory_mb": 4000, "node_id": "node-1"},
            {"min_memory_mb": 2000, "node_id": "node-2"},
            {"min_memory_mb": 10**6, "cpu_fallback": True},
            {"min_memory_mb": 10**6},
            {"min_memory_mb": 1000, "node_id": "node-9"},
        ]
        for n, body in enumerate(wanted):
            answer = post(self.urls[n % 2], "/leases", {"agent": "alice", "ttl_seconds": 600, **body})
            self.lease_answers[f"granted {answer['mode']}" if answer["granted"] else f"denied {answer['code']}"] += 1

    def break_a_gpu(self) -> None:
        """A client keeps what it leased beyond its lease, and somebody who never asked has something on another GPU."""
        root = self.cluster.settings.data_dir / "simulated-gpus"
        self._client = subprocess.Popen(dying_with_parent([find_binary("sleep"), "600"]))
        pid = self._client.pid
        wanted = {"agent": "bob", "min_memory_mb": 1000, "node_id": "node-2", "pid": pid, "ttl_seconds": 600}
        lease = post(self.urls[0], "/leases", wanted)
        self.lease_answers[f"granted {lease['mode']}"] += 1
        for uuid, name, size in ((lease["gpu_uuid"], str(pid), 1000), ("SIM-node-1-1", "foreign-1", 3000)):
            (root / uuid).mkdir(parents=True, exist_ok=True)
            (root / uuid / name).write_text(str(size))
        wait_until(lambda: self._one("SELECT MAX(foreign_mb) FROM gpus") == 3000, what="a sample with foreign memory")
        wait_until(lambda: self._one("SELECT COUNT(*) FROM gpus WHERE used_mb >= 1000") >= 2, what="samples of both")
        post(self.urls[0], f"/leases/{lease['token']}/release", {})
        wait_until(lambda: self._one("SELECT COUNT(*) FROM gpus WHERE quarantined_at IS NOT NULL"), what="a quarantine")

    def submit_too_much(self) -> None:
        self._put("/policies/agents/greedy", {"rate": 0.001, "burst": ALLOWED})
        bodies = [job(f"greedy-{n}", "echo", agent="greedy") for n in range(GREEDY)]
        answers = [http.post(f"{self.urls[0]}/jobs/submit", json=body).status_code for body in bodies]
        assert Counter(answers) == {202: ALLOWED, 429: GREEDY_REFUSED}

    def change_minds(self) -> None:
        """Some are cancelled before they began, and one dead letter is started over: it fails again.

        A few more share calls, and a few more fail: when all did so between two scrapes, nobody would see the increase.
        """
        for n in range(3):
            post(self.urls[n % 2], f"/jobs/tomorrow-{n}/cancel", {})
        post(self.urls[0], "/jobs/given-up-0/retry", {})
        wait_until(
            lambda: self.count("job_id = 'given-up-0' AND status = 'dead_letter' AND redrives = 1"), what="its end"
        )
        more = [job(f"gather-more-{n}", "gather") for n in range(15)]
        more += [job(f"never-more-{n}", "fail", {"kind": "permanent"}) for n in range(5)]
        post(self.urls[0], "/jobs/submit_batch", {"jobs": more})

    def finish(self) -> None:
        """Wait for all that end by themselves: what is delayed, kept by the cap or without a worker stays."""
        ended = ", ".join(f"'{status}'" for status in sorted(TERMINAL))
        rest = "job_id NOT LIKE 'tomorrow-%' AND job_id NOT LIKE 'capped-%' AND job_id <> 'lost-again'"
        wait_until(lambda: self.count(f"status NOT IN ({ended}) AND {rest}") == 0, timeout=90, what="all jobs ended")

    def count(self, condition: str) -> int:
        return int(self._one(f"SELECT COUNT(*) FROM {schema.jobs.name} WHERE {condition}") or 0)

    def _one(self, statement: str) -> Any:
        return self.cluster.db.read(lambda conn: conn.execute(text(statement)).scalar())

    def ask(self, url: str, path: str) -> Body:
        return dict(http.get(f"{url}{path}").raise_for_status().json())

    def _put(self, path: str, body: Body) -> None:
        http.put(f"{self.urls[0]}{path}", json=body).raise_for_status()

    def close(self) -> None:
        if self._client is not None:
            self._client.kill()
            self._client.wait()
