"""Two orchestrators, workers and a real Prometheus: every metric is what the database says, every panel has data."""

import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.leader.duties import DUTIES
from orchestrator.settings import Settings
from tests import grafana
from tests.cluster import Cluster, Member
from tests.e2e import scrapes
from tests.e2e.load import GREEDY_REFUSED, JOBS, Load
from tests.e2e.scrapes import PREFIX, Scrape
from tests.e2e.truth import STREAM, Reading, Truth, Values
from tests.promql import documented
from tests.servers import DEPLOYED, Prometheus, Redis
from tests.tables import make_tables
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

#: The same on every instance, and equal to what the tables say.
TOTALS = ("jobs_submitted_total", "jobs_finished_total", "retries_total", "reclaims_total")
TIMES = ("job_latency_seconds", "job_wait_seconds", "job_run_seconds")
GAUGES = (
    "job_queue_depth",
    "jobs_delayed",
    "jobs_blocked",
    "jobs_in_flight",
    "dlq_depth",
    "leader_epoch",
    "leases_active",
    "leases_free",
    "gpu_mem_used_pct",
    "gpu_mem_leased_mb",
    "gpu_mem_foreign_mb",
    "gpu_quarantined",
    "worker_pools_total",
    "worker_pool_workers",
)
#: The same on every instance, and always under way.
AGES = ("oldest_pending_age_seconds", "worker_heartbeat_age_seconds")
LAGS = ("publish_lag_seconds", "tally_lag_seconds")
UP = ("database_up", "redis_up")
#: Each instance's own, to be added up; and what each of them says of itself.
OWN = ("lease_decisions_total", "admission_decisions_total", "duty_failures_total", "duty_seconds", "recovery_seconds")
SELF = ("leader", "build_info", "batch_size")


#: Of both types of which a panel is looked at by itself.
FIRST_ENDS = " and ".join(f'count({PREFIX}job_latency_seconds_count{{type="{type}"}})' for type in ("fail", "gather"))


@pytest.fixture
def redis(private_server) -> Redis:
    return private_server(Redis)


@pytest.fixture
def cluster(mariadb, redis, tmp_path: Path) -> Iterator[Cluster]:
    """Default settings, but for workers that are lost and GPUs that are given up sooner."""
    given = Settings(
        database_url=mariadb.create_database(f"telemetry_{secrets.token_hex(4)}"),
        redis_url=redis.url,
        data_dir=tmp_path,
        gpu_backend="sim:2x24576",
        worker_slots=8,
        worker_heartbeat_s=1.0,
        worker_timeout_s=6.0,
        claim_idle_ms=2000,
        gpu_release_s=2.0,
        redis_timeout_s=2.5,
    )
    opened = Cluster(given, tmp_path, forked=True)
    make_tables(opened.db.engine)
    yield opened
    opened.close()


@pytest.mark.timeout(240)
def test_every_metric_is_what_the_database_says_and_every_panel_has_data(cluster, redis, private_server):
    begun = time.time()
    (first, one), (second, two) = cluster.serve(), cluster.serve()
    prometheus = private_server(partial(Prometheus, [url.removeprefix("http://") for url in (one, two)]))
    load = Load(cluster, redis, [one, two])
    try:
        load.run([first, second], seen=lambda: prometheus.query(FIRST_ENDS))
        check_metrics(load, [first, second], prometheus)
        check_rules(prometheus)
        check_panels(prometheus, begun)
    finally:
        load.close()


# ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_metrics(load: Load, serving: list[Member], prometheus: Prometheus) -> None:
    truth = settled(load)
    wait_until(lambda: seen_by(prometheus, truth), what="Prometheus has seen the end")
    instances = [scrapes.of_instance(url) for url in load.urls]
    check_that_nothing_is_forgotten(instances)
    shared = [name for names in (TOTALS, GAUGES, UP) for name in names]
    views = {
        "first": instances[0],
        "second": instances[1],
        "Prometheus": scrapes.of_prometheus(prometheus, "max", shared) | times_of(prometheus, "max"),
        "Prometheus, least": scrapes.of_prometheus(prometheus, "min", shared) | times_of(prometheus, "min"),
    }
    for where, scrape in views.items():
        for name in (*TOTALS, *GAUGES):
            assert told(scrape[name]) == pytest.approx(told(getattr(truth, name)())), f"{name} of {where}"
        for name in TIMES:
            check_histogram(name, scrape, getattr(truth, name)(), where)
        assert [scrape[name] for name in UP] == [{(): 1.0}, {(): 1.0}]
    check_what_was_planned(truth)
    check_ages(load, prometheus)
    check_what_instances_did(load, serving, prometheus, truth)


def settled(load: Load) -> Truth:
    """The truth, once everybody knows it: what ended is counted, and what was measured is served."""

    def served() -> Truth | None:
        truth = Truth(load.cluster.db)
        found = [scrapes.of_instance(url) for url in load.urls]
        names = ("jobs_finished_total", "job_queue_depth", "gpu_quarantined", "gpu_mem_used_pct", "leases_active")
        known = all(
            told(one.get(name, {})) == pytest.approx(told(getattr(truth, name)())) for one in found for name in names
        )
        return truth if known and all(one["tally_lag_seconds"] == {(): 0.0} for one in found) else None

    found = wait_until(served, what=lambda: f"instances know what the database knows: {difference(load)}")
    assert found is not None
    return found


def difference(load: Load) -> list[str]:
    truth, found = Truth(load.cluster.db), [scrapes.of_instance(url) for url in load.urls]
    return [
        f"{name}: {told(one.get(name, {}))} instead of {told(getattr(truth, name)())}"
        for one in found
        for name in (*TOTALS, *GAUGES)
        if told(one.get(name, {})) != pytest.approx(told(getattr(truth, name)()))
    ]


def seen_by(prometheus: Prometheus, truth: Truth) -> bool:
    names = ("jobs_finished_total", "gpu_quarantined")
    least = scrapes.of_prometheus(prometheus, "min", names)
    return all(told(least[name]) == told(getattr(truth, name)()) for name in names)


def told(reading: Reading) -> Reading:
    """Without zeros, which one may leave out and another may not."""
    return {labels: value for labels, value in reading.items() if value}


def check_that_nothing_is_forgotten(instances: list[Scrape]) -> None:
    checked = {PREFIX + name for names in (TOTALS, TIMES, GAUGES, AGES, LAGS, UP, OWN, SELF) for name in names}
    assert checked == documented(), "this test looks at every metric that there is"
    for scrape in instances:
        served = {PREFIX + re.sub(r"_(bucket|sum|count)$", "", name) for name in scrape}
        assert served == documented(), "and every instance serves them all"


def times_of(prometheus: Prometheus, operation: str) -> Scrape:
    parts = [f"{name}_{part}" for name in TIMES for part in ("bucket", "sum", "count")]
    return scrapes.of_prometheus(prometheus, operation, parts)


def check_histogram(name: str, scrape: Scrape, values: Values, where: str) -> None:
    about = f"{name} of {where}"
    assert told(scrape[f"{name}_count"]) == {labels: len(found) for labels, found in values.items()}, about
    # Microseconds, as the tables keep them.
    assert scrape[f"{name}_sum"] == pytest.approx({labels: sum(found) for labels, found in values.items()}, abs=0.01)
    buckets = scrape[f"{name}_bucket"]
    bounds = {bound for bound, *_ in buckets}
    assert len(bounds) > 5 and "+Inf" in bounds
    assert told(buckets) == told(
        {
            (bound, *labels): float(sum(value <= float(bound) for value in found))
            for labels, found in values.items()
            for bound in bounds
        }
    ), about


def check_what_was_planned(truth: Truth) -> None:
    """The tables, in turn, say what was done to them: none of the above compares nothing with nothing."""
    assert sum(truth.jobs_submitted_total().values()) == JOBS
    finished = truth.jobs_finished_total()
    assert finished["skipped", "fail"] == 40
    assert finished["failed", "fail"] == 100 + 5
    assert finished["dead_letter", "fail"] == 41  # one of them twice
    assert finished["dead_letter", "sleep"] == 7
    assert finished["dead_letter", "crash"] == 4
    assert finished["cancelled", "echo"] == 3
    assert finished["cancelled", "sleep"] == 1
    assert truth.reclaims_total() == {("retried",): 1, ("buried",): 1, ("cancelled",): 1}
    assert truth.retries_total()[("redrive",)] == 1
    assert told(truth.job_queue_depth()) == {(STREAM,): 1, (f"{STREAM}:doomed",): 1}
    assert told(truth.jobs_delayed()) == {(STREAM,): 7}
    assert told(truth.jobs_blocked()) == {(STREAM,): 3}
    assert truth.dlq_depth() == {(): 40 + 7 + 4}
    assert truth.worker_pools_total() == {("running",): 1, ("starting",): 1, ("evicted",): 1}
    assert told(truth.worker_pool_workers()) == {("default",): 2, ("warm",): 2}
    assert sum(truth.gpu_quarantined().values()) == 1
    assert max(truth.gpu_mem_foreign_mb().values()) == 3000


def check_ages(load: Load, prometheus: Prometheus) -> None:
    before = Truth(load.cluster.db).oldest_pending_age_seconds()
    views = [scrapes.of_instance(url) for url in load.urls]
    views.append(scrapes.of_prometheus(prometheus, "max", (*AGES, *LAGS)))
    after = Truth(load.cluster.db).oldest_pending_age_seconds()
    for scrape in views:
        ages = scrape["oldest_pending_age_seconds"]
        assert told(ages).keys() == told(after).keys() == {(f"{STREAM}:doomed",)}
        # What is shown may have been looked at, and scraped, some seconds ago.
        assert all(before[stream] - 10 < ages[stream] <= after[stream] for stream in told(ages))
        silent = scrape["worker_heartbeat_age_seconds"]
        assert silent.keys() == {("default",), ("warm",)}
        assert all(0 <= age < load.cluster.settings.worker_timeout_s for age in silent.values())
        # Nothing is ready and not announced, and every event was counted; one of a pool may have happened since.
        assert scrape["publish_lag_seconds"] == {(): 0.0}
        assert 0 <= scrape["tally_lag_seconds"][()] < 30


def check_what_instances_did(load: Load, serving: list[Member], prometheus: Prometheus, truth: Truth) -> None:
    together = scrapes.added([scrapes.of_instance(url) for url in load.urls])
    names = (
        "lease_decisions_total",
        "admission_decisions_total",
        "duty_failures_total",
        "recovery_seconds_count",
        "leader",
    )
    for scrape in (together, scrapes.of_prometheus(prometheus, "sum", names)):
        answers = {" ".join(labels): count for labels, count in told(scrape["lease_decisions_total"]).items()}
        assert answers == load.lease_answers
        assert {name: count for name, count in answers.items() if name.startswith("granted")} == truth.granted()
        decisions = told(scrape["admission_decisions_total"])
        assert decisions.pop(("rejected", "rate_limited")) == GREEDY_REFUSED
        assert {decision for decision, _ in decisions} == {"admitted", "queued"}
        assert sum(decisions.values()) == len(truth.jobs)
        assert told(scrape["duty_failures_total"]) == failures(serving) != {}
        assert scrape["recovery_seconds_count"] == {(): float(truth.lost_workers())}
        assert told(scrape["leader"]) == truth.leader()
    assert load.cluster.settings.worker_timeout_s < together["recovery_seconds_sum"][()] <= truth.silence()
    assert told(together["duty_seconds_count"]).keys() == {(duty.name,) for duty in DUTIES}
    assert together["leader"].keys() == {tuple(holder) for holder in holders(load)}
    for scrape in [scrapes.of_instance(url) for url in load.urls]:
        assert scrape["build_info"] == truth.build_info()
        batches = (scrape["batch_size_count"][("gather",)], scrape["batch_size_sum"][("gather",)])
        assert batches == truth.batch_size() and batches[1] > batches[0]


def failures(serving: list[Member]) -> Reading:
    """What the logs say."""
    lines = [line for member in serving for line in member.log.read_text().splitlines()]
    found = [re.search(r"duty (?:failed|broke) duty=(\w+)", line) for line in lines]
    return {(duty,): float(times) for duty, times in Counter(match[1] for match in found if match).items()}


def holders(load: Load) -> list[list[str]]:
    return [[load.ask(url, "/control/leader")["self"]] for url in load.urls]


# ── rules ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_rules(prometheus: Prometheus) -> None:
    """All of deploy/prometheus is loaded and evaluated without an error, on what both instances really serve."""
    targets = prometheus.ask("targets")["activeTargets"]
    assert [target["health"] for target in targets] == ["up", "up"], targets

    def evaluated() -> list[Mapping[str, Any]] | None:
        found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return None if any(rule["health"] == "unknown" for rule in found) else found

    rules = wait_until(evaluated, what="every rule was evaluated")
    assert rules is not None
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}
    assert {rule["name"] for rule in rules} == written()
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert [name for name in recorded if not prometheus.query(name)] == [], "records without data"
    states = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
    quiet = {"OrchestratorNoLeader", "OrchestratorDatabaseDown", "OrchestratorRedisDown", "OrchestratorInstanceDown"}
    assert {states[name] for name in quiet} == {"inactive"}
    assert states["OrchestratorGpuQuarantined"] != "inactive"


def written() -> set[str]:
    files = [yaml.safe_load((DEPLOYED / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    rules = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    return {rule.get("record") or rule["alert"] for rule in rules}


# ── panels ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_panels(prometheus: Prometheus, begun: float) -> None:
    """Each panel's queries with every variable at All, and with the first value that Grafana would offer."""
    offered = {name: offers(prometheus, name) for name in ("job", "stream", "pool", "type")}
    assert all(offered.values()), offered
    job = {"job": offered["job"]}
    panels = grafana.queries()
    assert [str(query) for query in panels if not has_data(prometheus, query, job, begun)] == []
    for query in grafana.annotations():
        ranged(prometheus, grafana.sent(query.expression, job), begun)
    chosen = {name: values[:1] for name, values in offered.items()} | {"type": ["fail"]}
    narrow = [query for query in panels if grafana.variables_in(query.expression) & {"stream", "pool", "type"}]
    batches = [query for query in narrow if "batch_size" in query.expression]
    assert len(narrow) > 10 and len(batches) == 1
    assert [
        str(query) for query in narrow if query not in batches and not has_data(prometheus, query, chosen, begun)
    ] == []
    assert has_data(prometheus, batches[0], chosen | {"type": ["gather"]}, begun)


def offers(prometheus: Prometheus, variable: str) -> list[str]:
    """The values from which a user may choose."""
    definition = grafana.VARIABLES[variable]["definition"]
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", definition)
    assert match, definition
    selector = grafana.sent(match[1], {"job": ["gpu-orchestrator"]})
    return list(prometheus.ask(f"label/{match[2]}/values", **{"match[]": selector}))


def has_data(prometheus: Prometheus, query: grafana.Query, chosen: Mapping[str, list[str]], begun: float) -> bool:
    expression = grafana.sent(query.expression, chosen)
    values = instant(prometheus, expression) if query.instant else ranged(prometheus, expression, begun)
    return any(math.isfinite(value) for value in values)


def instant(prometheus: Prometheus, expression: str) -> list[float]:
    return [float(one["value"][1]) for one in prometheus.query(expression)]


def ranged(prometheus: Prometheus, expression: str, begun: float) -> list[float]:
    window = {"start": f"{begun:.3f}", "end": f"{time.time():.3f}", "step": "1"}
    found = prometheus.ask("query_range", query=expression, **window)["result"]
    return [float(value) for one in found for _, value in one["values"]]
