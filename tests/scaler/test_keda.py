"""What KEDA would make of live values, by the manifest with the metrics-api trigger; workers come and go as it says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from orchestrator.cli import run
from orchestrator.store import schema
from tests.cluster import Cluster, Member, post
from tests.plain import http
from tests.scaler.keda import ScaledObject, Trigger
from tests.scaler.manifests import environment, scaled_object, worker_pod
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e


class Deployment:
    """KEDA's ScaledObject, and a worker process for each of the first pods."""

    #: Processes at most: what is asked for beyond is seen in the numbers.
    MOST = 2

    def __init__(self, cluster: Cluster, url: str) -> None:
        self._cluster = cluster
        spec = scaled_object("metrics-api")["spec"]
        (trigger,) = spec["triggers"]
        given = trigger["metadata"]
        self._where = f"{url}{urlsplit(given['url']).path}"
        self._location = given["valueLocation"]
        self.keda = ScaledObject(spec, Trigger(float(given["targetValue"]), float(given["activationTargetValue"])))
        self.pods: list[Member] = []
        self.gone: list[Member] = []
        self.now = 0.0

    def says(self) -> dict:
        """Nothing, where KEDA would see an error."""
        try:
            answer = http.get(self._where, timeout=10)
        except httpx.TransportError:
            return {}
        return answer.json() if answer.status_code == 200 else {}

    def poll(self, seconds: float = 5.0) -> int:
        """Let time pass, ask once, and have as many pods as that comes to."""
        self.now += seconds
        replicas = self.keda.poll(self.now, self.says().get(self._location))
        self._have(min(replicas, self.MOST))
        return replicas

    def _have(self, count: int) -> None:
        while len(self.pods) < count:
            variables = environment(worker_pod()["containers"][0])
            self.pods.append(
                self._cluster.worker(
                    worker_pool=variables["ORCH_WORKER_POOL"],
                    worker_slots=int(variables["ORCH_WORKER_SLOTS"]),
                    worker_handlers=("tests.worker.gated_handlers",),
                )
            )
        while len(self.pods) > count:
            pod = self.pods.pop()
            self.gone.append(pod)
            stop(pod)


def stop(pod: Member) -> None:
    """As the kubelet does: the hook, then SIGTERM."""
    assert run(["drain-worker", "--pid", str(pod.process.pid), "--timeout", "60"]) == 0
    assert pod.process.wait(30) == 0


def submit(url: str, gate: Path, count: int) -> None:
    job = {"type": "gated", "payload": {"gate": str(gate)}, "pool_id": "embed"}
    assert post(url, "/jobs/submit_batch", {"jobs": [job] * count})["created"] == count


@pytest.mark.timeout(300)
def test_replicas_follow_the_backlog_from_zero_and_back_to_zero(cluster, tmp_path):
    _, url = cluster.serve()
    embed = Deployment(cluster, url)
    gates = {name: tmp_path / name for name in ("one", "few", "many")}
    for gate in gates.values():
        gate.touch()

    # Nobody ever heard of the pool: that is an error, no zero; the fallback keeps somebody there after a while.
    assert embed.says() == {} and embed.poll() == 0

    # One job wakes it.
    submit(url, gates["one"], 1)
    assert embed.poll() == 1
    wait_until(lambda: embed.says().get("running") == 1, what="it runs")
    assert embed.poll() == 1, "what runs keeps its worker"

    # A few more jobs than slots: nothing happens before somebody waits for long.
    submit(url, gates["few"], 11)
    wait_until(lambda: embed.says().get("oldest_wait_seconds", 0) > 2, what="a wait beyond 2 s")
    assert embed.says()["desired_workers"] == 3
    assert embed.poll() == 3

    # More than a hundred: a slot for each, up to the limit.
    submit(url, gates["many"], 120)
    wait_until(lambda: embed.says().get("running") == 8, what="two workers are full")
    assert embed.says()["desired_workers"] == 33
    assert embed.poll() == embed.keda.spec["maxReplicaCount"]
    assert len(embed.pods) == 2

    # Everything ends, on the way with what is seen of latencies.
    for gate in gates.values():
        gate.unlink()
    wait_until(lambda: embed.says().get("depth") == 0, timeout=60, what="an empty lane")
    said = embed.says()
    assert said["ended_lately"] and said["mean_latency_seconds"] > 0
    # The workers say so with their next heartbeats.
    wait_until(lambda: embed.says().get("desired_workers") == 0, what="idle workers")
    assert embed.poll() >= 1, "not before the cooldown"
    assert embed.poll(embed.keda.spec["cooldownPeriod"]) == 0
    assert embed.pods == [] and len(embed.gone) == 2
    wait_until(lambda: embed.says().get("workers") == 0, what="nobody left")

    # Nobody paid for any of this with an attempt.
    jobs = http.get(f"{url}/jobs", params={"pool_id": "embed", "limit": 200}).json()["jobs"]
    assert {(job["status"], job["attempts"], job["crashes"]) for job in jobs} == {("done", 1, 0)}
    assert len(jobs) == 132


def test_jobs_survive_a_scale_down_that_hits_their_worker(cluster, tmp_path):
    """The autoscaler chose wrongly: the pod drains."""
    _, url = cluster.serve()
    embed = Deployment(cluster, url)
    gate = tmp_path / "gate"
    gate.touch()
    job = {"type": "gated", "payload": {"gate": str(gate)}, "pool_id": "embed"}
    jobs = [job | {"job_id": f"long-{n}"} for n in range(2)]
    post(url, "/jobs/submit_batch", {"jobs": jobs})
    embed.poll()
    for job in jobs:
        cluster.wait_for(job["job_id"], "running")
    with ThreadPoolExecutor(1) as kubelet:
        stopped = kubelet.submit(stop, embed.pods.pop())
        wait_until(lambda: cluster.count("workers", schema.workers.c.status == "draining"), what="it drains")
        gate.unlink()
        stopped.result()
    for job in jobs:
        record = cluster.job(job["job_id"])
        assert (record["status"], record["attempt"], record["attempts"]) == ("done", 1, 1)


def test_the_length_of_the_stream_wakes_keeps_and_lets_go(cluster, redis_server, tmp_path):
    """The redis-streams trigger: what is in the window and what runs, and nothing else."""
    _, url = cluster.serve()
    spec = scaled_object("redis-streams")["spec"]
    (trigger,) = spec["triggers"]
    keda = ScaledObject(spec, Trigger(float(trigger["metadata"]["streamLength"])))
    gate = tmp_path / "gate"
    gate.touch()
    with redis.Redis.from_url(redis_server.url) as raw:

        def length() -> int:
            return int(raw.xlen(trigger["metadata"]["stream"]))

        assert keda.poll(0.0, length()) == 0
        submit(url, gate, 1)
        wait_until(lambda: length() == 1, what="an entry")
        assert keda.poll(5.0, length()) == 1
        Deployment(cluster, url).poll()
        wait_until(lambda: cluster.count("orchestrator_jobs", schema.jobs.c.status == "running"), what="it runs")
        assert keda.poll(5.0 + spec["cooldownPeriod"], length()) == 1, "what runs keeps its worker"
        gate.unlink()
        wait_until(lambda: length() == 0, what="an empty stream")
        assert keda.poll(2 * (5.0 + spec["cooldownPeriod"]), length()) == 0


def test_an_orchestrator_that_is_away_ends_nobody(cluster, tmp_path):
    """KEDA sees an error, not a zero, and keeps what there is."""
    server, url = cluster.serve()
    embed = Deployment(cluster, url)
    gate = tmp_path / "gate"
    gate.touch()
    submit(url, gate, 1)
    assert embed.poll() == 1
    server.kill()
    for _ in range(10):
        assert embed.poll(embed.keda.spec["cooldownPeriod"]) == 1
    assert len(embed.pods) == 1


@pytest.mark.parametrize(
    ("values", "replicas"),
    [([0], 0), ([1], 1), ([5], 5), ([50], 10), ([None], 0), ([None] * 3, 1), ([5, None, None, None], 5), ([5, 5.4], 5)],
)
def test_the_arithmetic_itself(values, replicas):
    keda = ScaledObject(scaled_object("metrics-api")["spec"], Trigger(1.0))
    assert [keda.poll(float(n), value) for n, value in enumerate(values)][-1] == replicas
