"""Prometheus metrics, named as in the contract. Other modules say what happened; names and labels stay here.

Counters and histograms count what this process did. Gauges describe the cluster and are read from the
database when somebody asks, so every instance shows the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from orchestrator import __version__
from orchestrator.tally import BOUNDS, Sizes

_PREFIX = "gpu_orchestrator"

_leader = Gauge("leader", "1 while this instance leads.", ["holder"], namespace=_PREFIX)
_duty_seconds = Histogram("duty_seconds", "Time a leader's duty took.", ["duty"], namespace=_PREFIX)
_duty_failures = Counter("duty_failures_total", "Runs of a duty that failed.", ["duty"], namespace=_PREFIX)
_submitted = Counter("jobs_submitted_total", "Jobs accepted by this instance.", ["type"], namespace=_PREFIX)
_lease_decisions = Counter(
    "lease_decisions_total",
    "Answers to lease requests by this instance.",
    ["decision", "reason"],
    namespace=_PREFIX,
)
_admission_decisions = Counter(
    "admission_decisions_total",
    "Decisions of this instance about new jobs.",
    ["decision", "reason"],
    namespace=_PREFIX,
)
_reclaims = Counter(
    "reclaims_total", "Jobs taken back from lost workers by this instance.", ["outcome"], namespace=_PREFIX
)
_retries = Counter(
    "retries_total", "Jobs that this instance sent back to wait for another attempt.", ["reason"], namespace=_PREFIX
)
_recovery = Histogram(
    "recovery_seconds",
    "From a worker's last heartbeat until this leader gave its jobs away.",
    namespace=_PREFIX,
    buckets=(1, 2, 5, 10, 11, 12, 13, 14, 15, 20, 30, 60, 120),
)
_build = Info("build", "The version that runs.", namespace=_PREFIX)
_build.info({"version": __version__})

#: Job types come from clients; beyond this many they share one label, so that nobody can fill the memory.
MAX_TYPES = 200
_types: set[str] = set()


def leading(holder: str, leads: bool) -> None:
    _leader.labels(holder).set(int(leads))


@contextmanager
def duty(name: str) -> Iterator[None]:
    with _duty_seconds.labels(name).time():
        yield


def duty_failed(name: str) -> None:
    _duty_failures.labels(name).inc()


def submitted(job_type: str, count: int = 1) -> None:
    _submitted.labels(_bounded(job_type)).inc(count)


def lease_decided(decision: str, reason: str) -> None:
    _lease_decisions.labels(decision, reason).inc()


def admission_decided(decision: str, reason: str, count: int = 1) -> None:
    _admission_decisions.labels(decision, reason).inc(count)


def reclaimed(outcome: str) -> None:
    _reclaims.labels(outcome).inc()


def recovered(silent_s: float) -> None:
    _recovery.observe(silent_s)


def retried(reason: str, count: int = 1) -> None:
    _retries.labels(reason).inc(count)


class _BatchSizes(Collector):
    """Counted by workers, who serve no metrics: this process adds up what they told since it first heard of them."""

    name = f"{_PREFIX}_batch_size"
    labels = ("type",)

    def __init__(self) -> None:
        self._sizes: dict[str, Sizes] = {}

    def add(self, job_type: str, more: Sizes) -> None:
        known = self._sizes.setdefault(_bounded(job_type), Sizes())
        known.calls = [calls + new for calls, new in zip(known.calls, more.calls, strict=True)]
        known.jobs += more.jobs

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, "Jobs that shared one call of their handler.", labels=self.labels)
        for job_type, sizes in sorted(self._sizes.items()):
            family.add_metric([job_type], _cumulated(sizes.calls), sizes.jobs)
        yield family


def _cumulated(calls: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:.1f}" for bound in BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate([*calls, 0]), strict=True))


_batch_sizes = _BatchSizes()
REGISTRY.register(_batch_sizes)


def batched(job_type: str, sizes: Sizes) -> None:
    _batch_sizes.add(job_type, sizes)


def _bounded(job_type: str) -> str:
    if len(_types) < MAX_TYPES:
        _types.add(job_type)
    return job_type if job_type in _types else "other"


# Gauges of the cluster.

#: Name → what it says, its labels. A gauge whose source is away is absent: zero would be a claim.
CLUSTER: dict[str, tuple[str, tuple[str, ...]]] = {
    "database_up": ("1 when the database answered this scrape; without it most gauges here are absent.", ()),
    "redis_up": ("1 when Redis answered this scrape.", ()),
    "leases_active": ("GPU leases that are held, those of jobs included.", ()),
    "leases_free": (
        "GPUs that could grant a lease now: healthy, open, sampled lately, with usable memory left.",
        (),
    ),
    "job_queue_depth": (
        "Jobs that are due and wait for a worker, in the database and in the stream.",
        ("stream",),
    ),
    "oldest_pending_age_seconds": (
        "Age of the oldest job that is due and waits; 0 when none does.",
        ("stream",),
    ),
    "jobs_in_flight": ("Jobs that a worker has claimed or runs.", ("pool_id",)),
    "gpu_mem_used_pct": ("Memory in use as the node last measured it, by whomever.", ("node", "gpu_index")),
    "gpu_mem_leased_mb": ("Memory promised to leases.", ("node", "gpu_index")),
    "gpu_mem_foreign_mb": ("Memory used by processes without a lease.", ("node", "gpu_index")),
    "gpu_quarantined": (
        "1 while the GPU grants nothing, because memory of an ended lease did not come back.",
        ("node", "gpu_index"),
    ),
    "worker_pools_total": ("Pools in each state.", ("status",)),
    "worker_pool_workers": ("Workers of the pool that are alive, draining ones included.", ("pool_id",)),
    "worker_heartbeat_age_seconds": (
        "Age of the oldest last heartbeat among a pool's live workers.",
        ("pool_id",),
    ),
    "dlq_depth": ("Jobs that were given up and neither redriven nor purged yet.", ()),
    "leader_epoch": ("Epoch of the current or last term.", ()),
}

#: Name → label values → value.
Readings = Mapping[str, Mapping[tuple[str, ...], float]]
CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Once(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, values in self._readings.items():
            text, labels = CLUSTER[name]
            family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=labels)
            for key, value in values.items():
                family.add_metric(key, value)
            yield family


def exposition(readings: Readings) -> bytes:
    """What this process counted and what was read about the cluster, in Prometheus' text format."""
    cluster = CollectorRegistry()
    cluster.register(_Once(readings))
    return generate_latest(REGISTRY) + generate_latest(cluster)


__all__ = [
    "CLUSTER",
    "CONTENT_TYPE",
    "REGISTRY",
    "Readings",
    "admission_decided",
    "batched",
    "duty",
    "duty_failed",
    "exposition",
    "leading",
    "lease_decided",
    "reclaimed",
    "recovered",
    "retried",
    "submitted",
]
