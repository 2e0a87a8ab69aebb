"""/livez, /readyz, /health, /workers, /gpus, /control/leader, /metrics"""

import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import insert, select, update

from orchestrator import batch_sizes
from orchestrator import tallies as tallies_rules
from orchestrator.api import gauges, probes, readings
from orchestrator.batch_sizes import Sizes
from orchestrator.dead_letters import DeadLetter
from orchestrator.errors import DatabaseUnavailable, RedisUnavailable
from orchestrator.gpu import Health
from orchestrator.leader.duties import DUTIES
from orchestrator.store import audit, schema, tallies
from orchestrator.store.audit import Event
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_shift
from orchestrator.telemetry import metrics
from tests.api.conftest import Running
from tests.factories import Hand, gpu, hire, many_jobs, row, set_job
from tests.servers import MariaDB, Redis
from tests.waiting import wait_until

pytestmark = pytest.mark.embedded_too

PREFIX = "gpu_orchestrator_"
PROBES = ["database", "redis", "workers", "stale_jobs"]


@pytest.fixture(autouse=True)
def _patient_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read for the first time may take as long as a busy machine needs."""
    monkeypatch.setattr(readings, "LIMIT_S", 30.0)


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
    hire(api.led().db, gpu(0))
    assert api.get("/livez").json() == {"status": "ok"}
    assert api.get("/readyz").json() == {"status": "ready", "degraded": []}
    answer = api.get("/health")
    health = answer.json()
    assert (answer.status_code, health["status"], health["workers"]) == (200, "ok", {"alive": 1})
    assert health["stale_jobs"] == 0
    assert health["database"] == {"ok": True} and health["redis"] == {"ok": True, "warnings": []}
    assert health["leader"]["holder"] == health["instance"] == api.orchestrator.holder


def test_jobs_of_the_dead_are_told_until_somebody_takes_them_back(
    db: Database, run_api: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "KEEP_S", 0.0)
    api = run_api(database_url=str(db.settings.database_url)).led()
    hand, other = hire(api.db), hire(api.db)
    hand.claim(api.submit(), api.submit())
    other.claim(api.submit())
    hire(api.db).go_silent()  # it owns nothing
    [api.submit() for _ in range(3)]
    assert (api.get("/health").json()["status"], api.get("/health").json()["stale_jobs"]) == ("ok", 0)
    api.orchestrator.leader.stop()
    hand.go_silent(61.0)
    health = api.get("/health")
    assert (health.status_code, health.json()["status"], health.json()["stale_jobs"]) == (200, "degraded", 2)


def test_stale_jobs_alone_are_a_reason_to_look(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody leads, and does not get to it."""
    api.led()
    for known in (lambda: 3, lambda: 0):
        monkeypatch.setattr(api.backend.probes, "stale_jobs", probes.Probe(known))
        health = api.get("/health").json()
        assert (health["leader"]["alive"], health["stale_jobs"]) == (True, known())
        assert health["status"] == ("degraded" if known() else "ok")

    def away() -> int:
        raise DatabaseUnavailable("too slow")

    monkeypatch.setattr(api.backend.probes, "stale_jobs", probes.Probe(away))
    health = api.get("/health").json()
    assert (health["status"], health["stale_jobs"]) == ("degraded", None)


def test_the_leader_is_known(api: Running) -> None:
    body = api.led().get("/control/leader").json()
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
    api = run_api(database_url=maria_db.settings.database_url, redis_url=redis.url).led()
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


@pytest.mark.parametrize(("path", "asked"), [("/readyz", ["database", "redis"]), ("/health", PROBES)])
def test_servers_are_asked_side_by_side(
    maria_api: Running, monkeypatch: pytest.MonkeyPatch, path: str, asked: list[str]
) -> None:
    together = threading.Barrier(len(asked))
    for name in asked:
        before = getattr(maria_api.backend.probes, name)._ask

        def ask(before: Callable[[], Any] = before) -> Any:
            together.wait(15)
            return before()

        monkeypatch.setattr(maria_api.backend.probes, name, probes.Probe(ask, limit_s=30.0))
    assert maria_api.get(path).status_code == 200
    assert not together.broken


def test_a_second_signal_ends_it_as_cleanly_as_one(maria_api: Running, caplog: pytest.LogCaptureFixture) -> None:
    maria_api.get("/livez")  # a connection that waits for the next request
    for _ in range(2):
        maria_api.server.handle_exit(signal.SIGINT, None)
    wait_until(lambda: not any(thread.name == "http" for thread in threading.enumerate()), what="it has ended")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


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
    hire(api.led().db, gpu(0))
    api.submit()
    api.post("/leases", {"agent": "a", "min_memory_mb": 1})
    wait_until(lambda: fresh(api, monkeypatch)["jobs_submitted"], what="the leader counts")
    names = fresh(api, monkeypatch).keys()
    assert names >= {
        *("leases_active", "leases_free", "job_queue_depth", "oldest_pending_age_seconds", "jobs_in_flight"),
        *("gpu_mem_used_pct", "gpu_mem_leased_mb", "gpu_mem_foreign_mb", "gpu_quarantined"),
        "worker_heartbeat_age_seconds",
        *("worker_pool_workers", "dlq_depth", "leader", "leader_epoch", "duty_seconds", "duty_failures"),
        *("jobs_submitted", "lease_decisions", "admission_decisions", "build_info", "database_up", "redis_up"),
        *("jobs_finished", "reclaims", "retries", "job_latency_seconds", "job_wait_seconds", "job_run_seconds"),
        *("jobs_delayed", "jobs_blocked", "publish_lag_seconds", "tally_lag_seconds", "recovery_seconds"),
        "worker_pools_total",
    }
    assert "# HELP gpu_orchestrator_leases_free GPUs that could grant a lease now" in api.get("/metrics").text


def test_values_are_those_of_the_database(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hire(api.led().db, gpu(0, 10_000, foreign_mb=2500), gpu(1, 10_000, health=Health.LOST))
    hire(api.db, pool="gold", node="node-2").go_silent(0.5)
    ids = [api.submit() for _ in range(3)] + [api.submit(pool_id="gold")]
    api.submit(earliest_start_at="2999-01-01T00:00:00Z")
    first.claim(ids[0])
    assert api.post("/leases", {"agent": "a", "min_memory_mb": 1000}).json()["granted"]
    (buried,) = first.claim(api.submit(max_attempts=1))
    first.fail(buried)
    jobless = DeadLetter("", "0-1", 0, "e", "malformed")
    api.orchestrator.hub.dead_letters.tell([jobless] * 5)  # entries without a job: no letters
    seen = fresh(api, monkeypatch)
    stream = "stream:orchestrator:inference_jobs"
    assert seen["job_queue_depth"] == {(stream,): 3, (f"{stream}:gold",): 1}
    assert seen["jobs_delayed"] == {(stream,): 1, (f"{stream}:gold",): 0}
    assert seen["jobs_blocked"] == {(stream,): 0, (f"{stream}:gold",): 0}
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


def test_what_a_claim_put_off_is_work_and_grows_old(mute: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """INV-24: also in a lane without a label of its own."""
    api = mute
    for lane, age_s in (("gold", 40.0), ("silver", 80.0)):
        job_id = api.submit(pool_id=lane)
        hire(api.db, pool=lane).offer(job_id, memory_mb=None)
        set_job(api.db, job_id, created_at=utc_shift(-age_s), not_before=utc_shift(30.0))
    monkeypatch.setattr(gauges, "MAX_LANES", 1)
    seen = fresh(api, monkeypatch)
    gold, other = ("stream:orchestrator:inference_jobs:gold",), ("other",)
    assert seen["job_queue_depth"] == {gold: 1, other: 1} and seen["jobs_delayed"] == {gold: 0, other: 0}
    ages = seen["oldest_pending_age_seconds"]
    assert 40 <= ages[gold] < 80 <= ages[other]


def test_pools_named_by_clients_cannot_multiply_series(mute: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    api = mute  # it would announce what waits in 300 lanes
    hire(api.db, pool="zz-staffed")
    monkeypatch.setattr(gauges, "MAX_LANES", 5)
    jobs = [{"type": f"t{i}", "payload": {}, "pool_id": f"p{i:03}"} for i in range(300)]
    assert api.post("/jobs/submit_batch", {"jobs": jobs}).json()["created"] == 300
    seen = fresh(api, monkeypatch)
    assert len(seen["job_queue_depth"]) == 5 + 1  # with workers, then the first; other
    assert sum(seen["job_queue_depth"].values()) == 300
    assert seen["job_queue_depth"][("other",)] == 296
    assert seen["jobs_in_flight"].keys() == {("zz-staffed",), *((f"p{i:03}",) for i in range(4)), ("other",)}
    assert seen["oldest_pending_age_seconds"][("other",)] > 0


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
        hand.beat(batch_sizes=batch_sizes.to_text({f"embed-{hand.worker_id}": counted, "embed": counted}))

    def shown() -> dict[str, str]:
        text = api.get("/metrics").text
        return dict(re.findall(r'gpu_orchestrator_batch_size_(\w+){(?:le="8.0",)?type="embed"} (\S+)', text))

    monkeypatch.setattr(metrics._batch_sizes, "_sizes", {})
    monkeypatch.setattr(metrics, "_types", set())  # other tests of this process may have named as many as there may be
    monkeypatch.setattr(readings, "KEEP_S", 0.0)
    monkeypatch.setattr(readings, "KEEP_MOST_S", 0.0)
    monkeypatch.setattr(readings, "PATIENCE_S", 30.0)
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
    asked, read = [], api.backend.gauges._read_cluster

    def counting() -> bytes:
        asked.append(1)
        return read()

    monkeypatch.setattr(api.backend.gauges._cluster, "_ask", counting)
    monkeypatch.setattr(readings, "KEEP_S", 60.0)
    monkeypatch.setattr(readings, "KEEP_MOST_S", 60.0)
    for _ in range(5):
        scrape(api)
    assert len(asked) == 1


@contextmanager
def hanging(reading: readings.Reading[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Its next questions are not answered until the end of this."""
    go_on, ask, asked = threading.Event(), reading._ask, threading.Event()

    def wait() -> bytes:
        asked.set()
        assert go_on.wait(30)
        return ask()

    monkeypatch.setattr(reading, "_ask", wait)
    try:
        yield asked
    finally:
        go_on.set()


def test_a_scrape_waits_for_no_count(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million entries take their time: meanwhile everybody sees what was counted last."""
    monkeypatch.setattr(readings, "KEEP_S", 0.0)
    monkeypatch.setattr(readings, "KEEP_MOST_S", 0.0)
    stream = ("stream:orchestrator:inference_jobs",)
    api.submit()
    assert fresh(api, monkeypatch)["job_queue_depth"][stream] == 1
    with hanging(api.backend.gauges._lanes, monkeypatch) as asked:
        api.submit()
        for _ in range(5):
            seen = scrape(api)
            assert seen["job_queue_depth"][stream] == 1 and seen["database_up"] == {(): 1}
        assert asked.is_set()
    wait_until(lambda: scrape(api)["job_queue_depth"][stream] == 2, what="counted")


def test_what_was_counted_too_long_ago_is_not_shown(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "KEEP_MOST_S", 0.0)
    api.submit()
    assert fresh(api, monkeypatch)["job_queue_depth"]
    monkeypatch.setattr(readings, "OLD_S", 0.0)
    monkeypatch.setattr(readings, "LIMIT_S", 0.1)
    with hanging(api.backend.gauges._lanes, monkeypatch):
        assert not {"job_queue_depth", "publish_lag_seconds"} & scrape(api).keys()


@pytest.mark.parametrize("reading", ["_cluster", "_lanes"])
def test_after_a_reading_that_failed_the_one_before_is_not_shown(
    api: Running, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    monkeypatch.setattr(readings, "KEEP_MOST_S", 0.0)
    api.submit()
    assert fresh(api, monkeypatch)["job_queue_depth"]

    def broken() -> bytes:
        raise DatabaseUnavailable("gone")

    monkeypatch.setattr(getattr(api.backend.gauges, reading), "_ask", broken)
    wait_until(lambda: "job_queue_depth" not in scrape(api), what="vanished")
    seen = scrape(api)
    assert "job_queue_depth" not in seen
    assert seen["database_up"] == {(): 0.0 if reading == "_cluster" else 1.0}


def test_a_database_that_answers_no_more_is_down_although_it_did_a_moment_ago(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "KEEP_MOST_S", 0.0)
    assert fresh(api, monkeypatch)["database_up"] == {(): 1}
    monkeypatch.setattr(readings, "LIMIT_S", 0.1)
    monkeypatch.setattr(api.backend.gauges._cluster, "_hangs_s", 0.1)
    with hanging(api.backend.gauges._cluster, monkeypatch):
        wait_until(lambda: scrape(api)["database_up"] == {(): 0}, what="down")
        assert "job_queue_depth" not in scrape(api)


#: Of one process, and what ages while one is asked after the other.
OWN = ("leader{", "duty_", "admission_", "lease_decisions", "recovery_", "build_", "batch_size")
AGES = ("oldest_pending_age", "worker_heartbeat_age", "tally_lag", "publish_lag")


def test_two_instances_say_the_same_of_the_cluster(api: Running, run_api: Callable[..., Running]) -> None:
    other = run_api(database_url=str(api.led().db.settings.database_url))
    hand = hire(api.db, gpu(0), pool="gold")
    ids = [api.submit(type=f"t{i % 3}", pool_id="gold") for i in range(6)]
    claims = hand.claim(*ids[:4])
    hand.finish(*claims[:2])
    hand.fail(claims[2])

    def lines(of: Running) -> list[str]:
        text = [line.removeprefix(PREFIX) for line in of.get("/metrics").text.splitlines() if line.startswith(PREFIX)]
        return [line for line in text if not line.startswith((*OWN, *AGES)) and "_created" not in line]

    def agreed() -> bool:
        mine = lines(api)
        return {*expected} <= {*mine} and mine == lines(other)

    expected = (
        'jobs_finished_total{status="done",type="t0"} 1.0',
        'jobs_submitted_total{type="t2"} 2.0',
        'retries_total{reason="transient"} 1.0',
        'job_queue_depth{stream="stream:orchestrator:inference_jobs:gold"} 4.0',
        'job_latency_seconds_count{type="t0"} 1.0',
    )

    wait_until(agreed, what="both have counted all", timeout=30)
    assert len(lines(api)) > 100


def test_series_are_bounded_whatever_clients_call_things(maria_api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 types, agents and pools, with quotes, newlines and backslashes in those that are stored behind the API."""
    db = maria_api.db
    maria_api.orchestrator.leader.stop()  # it would announce what waits in 4,000 lanes
    noise = random.Random(7)
    names = [f"{noise.randrange(16**9):09x}" for _ in range(4_000)]
    hostile = ['a"b', "a\\b", "a\nb", "é", "x" * 60]
    db.write(lambda conn: conn.execute(insert(schema.lanes), [{"lane": f"lane-{name}"} for name in names]))
    many_jobs(
        db,
        4_000,
        type=lambda i: f"{hostile[i % 5]}-{i % 97}" if i < 500 else f"type-{names[i]}"[:64],
        agent=lambda i: f"agent-{names[i]}",
        lane=lambda i: f"lane-{names[i]}",
    )
    events = [Event("job.submitted", job_id=f"many-{i:06}", actor=f"agent-{names[i]}") for i in range(4_000)]
    for first in range(0, len(events), 1000):
        db.write(partial(audit.record, events=events[first : first + 1000]))
    while db.write(tallies.fold):
        pass
    seen = fresh(maria_api, monkeypatch)
    assert len(seen["jobs_submitted"]) == 201
    assert sum(seen["jobs_submitted"].values()) == 4_000
    for name in ("job_queue_depth", "jobs_delayed", "jobs_blocked", "oldest_pending_age_seconds", "jobs_in_flight"):
        assert len(seen[name]) == 201, name
    assert sum(seen["job_queue_depth"].values()) == 4_000
    text = maria_api.get("/metrics").text
    assert not re.search("agent-[0-9a-f]{9}", text)
    # One more family with a name for each would be thousands; today there are 2,700.
    assert len(text.splitlines()) < 4_000


def test_what_is_known_in_advance_is_zero_from_the_start(api: Running) -> None:
    seen = scrape(api.led())
    assert {duty for (duty,) in seen["duty_failures"]} >= {duty.name for duty in DUTIES}
    assert {reason for (reason,) in seen["retries"]} == {*tallies_rules.REASONS}
    assert {outcome for (outcome,) in seen["reclaims"]} == {"retried", "buried", "cancelled"}
    assert ("granted", "cpu") in seen["lease_decisions"] and ("denied", "no_memory") in seen["lease_decisions"]
    assert ("rejected", "rate_limited") in seen["admission_decisions"]


# --- delivery that stands still ---


def next_lag(api: Running) -> float:
    """As the next reading says: what the last one saw is not shown again."""
    api.backend.gauges._lanes._known = None
    return scrape(api)["publish_lag_seconds"][()]


def publish_lag(api: Running) -> float:
    """As the second of two readings says: at the first nobody knows whether it was so before."""
    return [next_lag(api) for _ in range(2)][1]


@pytest.fixture
def mute(api: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """An instance whose publisher announces nothing."""
    monkeypatch.setattr(api.orchestrator.publisher, "publish", lambda _lane: 0)
    return api


def age_workers(db: Database, seconds: float) -> None:
    db.write(lambda conn: conn.execute(update(schema.workers).values(started_at=utc_shift(-seconds))))


def test_delivery_that_stands_still_is_seen(mute: Running) -> None:
    hire(mute.db)
    job_id = mute.submit()
    age_workers(mute.db, 3600.0)
    set_job(mute.db, job_id, created_at=utc_shift(-300.0))
    assert 290 < publish_lag(mute) < 400


def test_a_backlog_is_no_lag(mute: Running) -> None:
    first, second = mute.submit(), mute.submit()
    for job_id in (first, second):
        set_job(mute.db, job_id, created_at=utc_shift(-300.0))
    assert publish_lag(mute) == 0  # nobody listens
    hand = hire(mute.db)
    assert publish_lag(mute) < 60  # nobody did until now
    age_workers(mute.db, 3600.0)
    set_job(mute.db, first, queued="announced", published_at=utc_shift(0.0))
    assert publish_lag(mute) == 0  # something is announced
    hand.claim(first)
    assert publish_lag(mute) < 60  # it went on until just now
    assert mute.post("/control/pause", {"scope": "pool", "name": "default"}).status_code == 200
    set_job(mute.db, first, claimed_at=utc_shift(-200.0))
    assert publish_lag(mute) == 0  # nothing should be


def test_a_job_that_just_became_ready_is_no_lag(mute: Running) -> None:
    hire(mute.db)
    age_workers(mute.db, 3600.0)
    job_id = mute.submit(earliest_start_at="2999-01-01T00:00:00Z")
    set_job(mute.db, job_id, created_at=utc_shift(-300.0), not_before=utc_shift(-1.0))
    wait_until(lambda: row(mute.db, job_id).queued == "ready", what="promoted")
    assert publish_lag(mute) < 60


def test_what_goes_on_while_somebody_looks_twice_is_no_lag(mute: Running) -> None:
    hire(mute.db)
    job_id = mute.submit()
    age_workers(mute.db, 3600.0)
    set_job(mute.db, job_id, created_at=utc_shift(-300.0))
    assert next_lag(mute) == 0  # it may be a matter of moments
    set_job(mute.db, job_id, queued="announced", published_at=utc_shift(0.0))
    second = mute.submit()
    assert next_lag(mute) == 0
    set_job(mute.db, job_id, queued="ready", published_at=None, ready_at=None)
    set_job(mute.db, second, created_at=utc_shift(-300.0))
    assert next_lag(mute) == 0  # another time, and perhaps for a moment again
    assert 290 < next_lag(mute) < 400


def test_nothing_is_said_about_a_database_without_tables(run_api: Callable[..., Running], mariadb: MariaDB) -> None:
    url = mariadb.create_database("without_tables")
    seen = scrape(run_api(database_url=url))
    assert seen["database_up"] == {(): 0}
    assert not {"leases_active", "job_queue_depth", "leader_epoch"} & seen.keys()
