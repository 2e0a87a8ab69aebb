"""/livez, /readyz, /health, /workers, /gpus, /control/leader, /metrics"""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select

from orchestrator import tally
from orchestrator.api import gauges, probes
from orchestrator.dead_letters import DeadLetter
from orchestrator.errors import RedisUnavailable
from orchestrator.gpu import Health
from orchestrator.store import schema
from orchestrator.tally import Sizes
from orchestrator.telemetry import metrics
from tests.api.conftest import Running
from tests.factories import Hand, gpu, hire
from tests.servers import MariaDB, Redis
from tests.waiting import wait_until

pytestmark = pytest.mark.embedded_too

PREFIX = "gpu_orchestrator_"


def led(api: Running) -> Running:
    wait_until(lambda: api.get("/control/leader").json()["alive"], what="somebody leads")
    return api


def scrape(api: Running) -> dict[str, dict[tuple[str, ...], float]]:
    answer = api.get("/metrics")
    assert answer.status_code == 200
    return {
        family.name.removeprefix(PREFIX): {tuple(s.labels.values()): s.value for s in family.samples}
        for family in text_string_to_metric_families(answer.text)
    }


def fresh(api: Running, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[tuple[str, ...], float]]:
    """A scrape that nothing older answers."""
    monkeypatch.setattr(api.backend, "gauges", gauges.Gauges(api.orchestrator))
    return scrape(api)


def test_a_healthy_instance(api: Running) -> None:
    hire(led(api).db, gpu(0))
    assert api.get("/livez").json() == {"status": "ok"}
    assert api.get("/readyz").json() == {"status": "ready", "degraded": []}
    answer = api.get("/health")
    health = answer.json()
    assert (answer.status_code, health["status"], health["workers"]) == (200, "ok", {"alive": 1})
    assert health["database"] == {"ok": True} and health["redis"] == {"ok": True, "warnings": []}
    assert health["leader"]["holder"] == health["instance"] == api.orchestrator.holder


def test_the_leader_is_known(api: Running) -> None:
    body = led(api).get("/control/leader").json()
    assert body.keys() >= {"holder", "epoch", "expires_at", "alive", "self"}
    assert body["holder"] == body["self"] == api.orchestrator.holder
    assert body["epoch"] >= 1 and body["expires_at"].endswith("Z")


def test_workers_and_gpus_are_listed(api: Running) -> None:
    hand = hire(api.db, gpu(0), gpu(1))
    [worker] = api.get("/workers").json()["workers"]
    assert (worker["worker_id"], worker["types"], worker["status"]) == (hand.worker_id, ["echo"], "active")
    assert worker["last_heartbeat"].endswith("Z")
    assert [(one["gpu_index"], one["fresh"]) for one in api.get("/gpus").json()["gpus"]] == [
        (0, True),
        (1, True),
    ]


def test_without_tables_it_is_not_ready(database_url: str, run_api: Callable[..., Running], request: Any) -> None:
    if not database_url.startswith("sqlite"):
        database_url = request.getfixturevalue("mariadb").create_database("without_tables")
    answer = run_api(database_url=database_url).get("/readyz")
    assert answer.status_code == 503
    assert "gpuorch migrate" in answer.json()["reasons"][0]


def test_redis_away_degrades_and_submits_still_work(
    maria_db, run_api: Callable[..., Running], private_server: Callable[[type[Redis]], Redis]
) -> None:
    redis = private_server(Redis)
    api = led(run_api(database_url=maria_db.settings.database_url, redis_url=redis.url))
    redis.kill()
    ready = api.get("/readyz")
    assert ready.status_code == 200 and ready.json()["degraded"][0].startswith("redis: ")
    assert api.get("/health").json()["status"] == "degraded"
    api.submit()
    seen = scrape(api)
    # The rows are the truth about dead letters: a Redis that is away hides none of them.
    assert seen["redis_up"] == {(): 0} and seen["dlq_depth"] == {(): 0} and seen["database_up"] == {(): 1}
    redis.start()
    assert api.get("/readyz").json() == {"status": "ready", "degraded": []}


def test_an_evicting_redis_is_reported(api: Running, redis_server: Redis) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert "noeviction" in api.get("/readyz").json()["degraded"][0]
            assert api.get("/health").json()["status"] == "degraded"
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_a_frozen_server_costs_one_thread_and_bounded_time(maria_api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def frozen() -> list[str]:
        calls.append(1)
        wait_until(lambda: not frozen_now, timeout=20, what="thawed")
        raise RedisUnavailable("thawed")

    frozen_now = [True]
    monkeypatch.setattr(maria_api.backend.probes, "redis", probes.Probe(frozen, limit_s=0.2))
    started = time.monotonic()
    answers = [maria_api.get("/readyz").json() for _ in range(4)]
    assert time.monotonic() - started < 5
    assert all("no answer within" in answer["degraded"][0] for answer in answers)
    assert len(calls) == 1
    frozen_now.clear()
    wait_until(lambda: "thawed" in maria_api.get("/readyz").text, what="the next question is asked")


# --- metrics ---


def test_every_promised_name_is_there(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    hire(led(api).db, gpu(0))
    api.submit()
    api.post("/leases", {"agent": "a", "min_memory_mb": 1})
    names = fresh(api, monkeypatch).keys()
    assert names >= {
        *("leases_active", "leases_free", "job_queue_depth", "oldest_pending_age_seconds", "jobs_in_flight"),
        *("gpu_mem_used_pct", "gpu_mem_leased_mb", "gpu_mem_foreign_mb", "gpu_quarantined"),
        "worker_heartbeat_age_seconds",
        *("worker_pool_workers", "dlq_depth", "leader", "leader_epoch", "duty_seconds", "duty_failures"),
        *("jobs_submitted", "lease_decisions", "build_info", "database_up", "redis_up"),
        *("reclaims", "retries"),
    }
    assert "# HELP gpu_orchestrator_leases_free GPUs that could grant a lease now" in api.get("/metrics").text


def test_values_are_those_of_the_database(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hire(led(api).db, gpu(0, 10_000, foreign_mb=2500), gpu(1, 10_000, health=Health.LOST))
    hire(api.db, pool="gold", node="node-2").go_silent(0.5)
    ids = [api.submit() for _ in range(3)] + [api.submit(pool_id="gold")]
    api.submit(earliest_start_at="2999-01-01T00:00:00Z")
    first.claim(ids[0])
    assert api.post("/leases", {"agent": "a", "min_memory_mb": 1000}).json()["granted"]
    (buried,) = first.claim(api.submit(max_attempts=1))
    first.fail(buried)
    api.orchestrator.hub.bury([DeadLetter("", "0-1", 0, "e", "malformed")] * 5)  # entries without a job: no letters
    seen = fresh(api, monkeypatch)
    stream = "stream:orchestrator:inference_jobs"
    assert seen["job_queue_depth"] == {(stream,): 2, (f"{stream}:gold",): 1}
    assert seen["jobs_in_flight"] == {("default",): 1, ("gold",): 0}
    assert 0 < seen["oldest_pending_age_seconds"][(stream,)] < 30
    assert seen["worker_pool_workers"] == {("default",): 1, ("gold",): 1}
    assert 0.4 < seen["worker_heartbeat_age_seconds"][("gold",)] < 30
    assert seen["leases_active"] == {(): 1} and seen["leases_free"] == {(): 1}
    assert seen["gpu_mem_used_pct"][("0", "node-1")] == 25
    assert seen["gpu_mem_leased_mb"] == {("0", "node-1"): 1000, ("1", "node-1"): 0}
    assert seen["gpu_mem_foreign_mb"][("0", "node-1")] == 2500
    assert seen["dlq_depth"] == {(): 1}
    [epoch] = api.db.read(lambda conn: conn.execute(select(schema.leadership.c.epoch)).scalars().all())
    assert seen["leader_epoch"] == {(): epoch}
    assert seen["leader"][(api.orchestrator.holder,)] == 1


def test_an_idle_lane_is_zero_and_not_absent(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = hire(api.db)
    hand.finish(*hand.claim(api.submit()))
    seen = fresh(api, monkeypatch)
    stream = ("stream:orchestrator:inference_jobs",)
    assert (seen["job_queue_depth"][stream], seen["oldest_pending_age_seconds"][stream]) == (0, 0)


def test_pools_named_by_clients_cannot_multiply_series(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    hire(api.db, pool="zz-staffed")
    monkeypatch.setattr(gauges, "MAX_LANES", 5)
    jobs = [{"type": f"t{i}", "payload": {}, "pool_id": f"p{i:03}"} for i in range(300)]
    assert api.post("/jobs/submit_batch", {"jobs": jobs}).json()["created"] == 300
    seen = fresh(api, monkeypatch)
    assert len(seen["job_queue_depth"]) == 5 + 1 + 1  # named, with workers, other
    assert sum(seen["job_queue_depth"].values()) == 300
    assert seen["job_queue_depth"][("other",)] == 295
    assert ("zz-staffed",) in seen["jobs_in_flight"]
    again = scrape(api)
    assert again["job_queue_depth"].keys() == seen["job_queue_depth"].keys()
    assert len({labels for labels in seen["jobs_submitted"] if labels[0].startswith("t")}) <= 2 * 201


def test_paths_and_methods_add_no_series(maria_api: Running) -> None:
    def shape() -> set[str]:
        return set(re.findall(r"^(\S+) ", maria_api.get("/metrics").text, re.MULTILINE))

    before = shape()
    for i in range(50):
        maria_api.get(f"/random/{i}")
        maria_api.get(f"/jobs/none-{i}")
        maria_api.http.request(["PUT", "PATCH", "TRACE", "PROPFIND"][i % 4], f"/jobs/random-{i}")
    assert {line for line in shape() - before if "random" in line or "PROPFIND" in line or "none-" in line} == set()


def test_sizes_of_batches_add_up_also_when_their_worker_leaves(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(hand: Hand, *sizes: int) -> None:
        counted = Sizes()
        for size in sizes:
            counted.count(size)
        hand.beat(batch_sizes=tally.to_text({f"embed-{hand.worker_id}": counted, "embed": counted}))

    def shown() -> dict[str, str]:
        text = api.get("/metrics").text
        return dict(re.findall(r'gpu_orchestrator_batch_size_(\w+){(?:le="8.0",)?type="embed"} (\S+)', text))

    monkeypatch.setattr(metrics._batch_sizes, "_sizes", {})
    monkeypatch.setattr(metrics, "_types", set())  # other tests of this process may have named as many as there may be
    monkeypatch.setattr(gauges, "KEEP_S", 0.0)
    monkeypatch.setattr(api.backend, "gauges", gauges.Gauges(api.orchestrator))
    first, second = hire(api.db), hire(api.db)
    told(first, 1, 8)
    assert shown() == {"bucket": "2.0", "count": "2.0", "sum": "9.0"}
    told(first, 1, 8, 9)
    told(second, 32)
    assert shown() == {"bucket": "2.0", "count": "4.0", "sum": "50.0"}
    first.go_silent(7200.0)
    assert shown() == {"bucket": "2.0", "count": "4.0", "sum": "50.0"}


def test_scrapes_within_a_second_share_one_reading(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    readings, read = [], api.backend.gauges._read_database

    def counting() -> dict[str, gauges.Values]:
        readings.append(1)
        return read()

    monkeypatch.setattr(api.backend.gauges._database, "_ask", counting)
    monkeypatch.setattr(api.backend.gauges._database, "_keep_s", 60.0)
    for _ in range(5):
        scrape(api)
    assert len(readings) == 1


def test_nothing_is_said_about_a_database_without_tables(run_api: Callable[..., Running], mariadb: MariaDB) -> None:
    url = mariadb.create_database("without_tables")
    seen = scrape(run_api(database_url=url))
    assert seen["database_up"] == {(): 0}
    assert not {"leases_active", "job_queue_depth", "leader_epoch"} & seen.keys()
