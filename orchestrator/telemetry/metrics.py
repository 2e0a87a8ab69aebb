"""Prometheus metrics, named as in the contract. Other modules say what happened; names and labels stay here.

What only one process knows (its decisions, its duties) is counted here and is that process's. Everything else is the
cluster's and stands in the database: gauges, and totals of jobs that the leader counts (`store.tallies`). Of that every
instance shows the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from orchestrator import __version__, tallies
from orchestrator.batch_sizes import BOUNDS, Sizes
from orchestrator.placement import Reason
from orchestrator.tallies import MAX_TYPES, OTHER, Totals

_PREFIX = "gpu_orchestrator"
disable_created_metrics()  # type: ignore[no-untyped-call]  # gauges that nobody asks for

_leader = Gauge("leader", "1 while this instance leads.", ["holder"], namespace=_PREFIX)
_duty_seconds = Histogram("duty_seconds", "Time a leader's duty took.", ["duty"], namespace=_PREFIX)
_duty_failures = Counter("duty_failures_total", "Runs of a duty that failed.", ["duty"], namespace=_PREFIX)
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
_recovery = Histogram(
    "recovery_seconds",
    "From a worker's last heartbeat until this leader gave its jobs away.",
    namespace=_PREFIX,
    buckets=(1, 2, 5, 10, 11, 12, 13, 14, 15, 20, 30, 60, 120),
)
_build = Info("build", "The version that runs.", namespace=_PREFIX)
_build.info({"version": __version__})

#: Label sets that are known in advance are 0 from the start: of a series that begins with 1, nobody sees the increase.
for _mode in ("gpu", "cpu"):
    _lease_decisions.labels("granted", _mode)
for _reason in Reason:
    _lease_decisions.labels("denied", _reason)
for _decided in (
    ("admitted", "free"),
    ("cpu", "no_gpu"),
    *[("queued", kind) for kind in ("agent-limit", "cap", "capacity", "gate", "quiet")],
    *[
        ("rejected", code)
        for code in ("agent_limit", "gate_closed", "overloaded", "paused", "queue_full", "rate_limited")
    ],
):
    _admission_decisions.labels(*_decided)

#: Types that batches were told of here.
_types: set[str] = set()


def leading(holder: str, leads: bool) -> None:
    _leader.labels(holder).set(int(leads))


@contextmanager
def duty(name: str) -> Iterator[None]:
    with _duty_seconds.labels(name).time():
        yield


def expect_duties(names: Iterable[str]) -> None:
    for name in names:
        _duty_seconds.labels(name)
        _duty_failures.labels(name)


def duty_failed(name: str) -> None:
    _duty_failures.labels(name).inc()


def lease_decided(decision: str, reason: str) -> None:
    _lease_decisions.labels(decision, reason).inc()


def admission_decided(decision: str, reason: str, count: int = 1) -> None:
    _admission_decisions.labels(decision, reason).inc(count)


def recovered(silent_s: float) -> None:
    _recovery.observe(silent_s)


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


def batched(job_type: str, sizes: Sizes) -> None:
    _batch_sizes.add(job_type, sizes)


def _bounded(job_type: str) -> str:
    if len(_types) < MAX_TYPES:
        _types.add(job_type)
    return job_type if job_type in _types else OTHER


# ── gauges of the cluster ───────────────────────────────────────────────────────────────────────────────────────────

#: Name → what it says, its labels. A gauge whose source is away is absent: zero would be a claim.
CLUSTER: dict[str, tuple[str, tuple[str, ...]]] = {
    "database_up": ("1 when the database answered this scrape; without it most gauges here are absent.", ()),
    "redis_up": ("1 when Redis answered this scrape.", ()),
    "leases_active": ("GPU leases that are held, those of jobs included.", ()),
    "leases_free": (
        "GPUs that could grant a lease now: healthy, open, sampled lately, with usable memory left.",
        (),
    ),
    "job_queue_depth": ("Jobs that are due and wait for a worker, or have one.", ("stream",)),
    "jobs_delayed": ("Jobs that wait until they are due.", ("stream",)),
    "jobs_blocked": ("Jobs that wait for a cap, a gate or other tasks.", ("stream",)),
    "oldest_pending_age_seconds": (
        "Age of the oldest job that is due and waits; 0 when none does.",
        ("stream",),
    ),
    "publish_lag_seconds": (
        "How long a job could have been announced where workers listen and nothing is; 0 when delivery goes on.",
        (),
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
    "dlq_depth": ("Jobs that were given up and neither redriven nor purged yet, up to 100000.", ()),
    "leader_epoch": ("Epoch of the current or last term.", ()),
    "tally_lag_seconds": ("Age of the oldest event that totals of jobs do not count yet; 0 when they count all.", ()),
}

#: Totals of the cluster, the same for every instance: name → what it says, its labels.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    tallies.SUBMITS: ("Jobs that were accepted.", ("type",)),
    tallies.FINISHES: ("Jobs that came to their end, by how they did.", ("type", "status")),
    tallies.RETRIES: ("Jobs that were sent back to wait for another attempt.", ("reason",)),
    tallies.RECLAIMS: ("Jobs taken back from lost workers.", ("outcome",)),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    tallies.LATENCY: ("From a job's submit, or from when it was started over, to its end.", ("type",)),
    tallies.WAIT: ("From when a job could have started to its first claim.", ("type",)),
    tallies.RUN: ("Time of one attempt's handler.", ("type",)),
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


# Totals are ten thousand lines where there are many types, and the library takes a tenth of a second for so many: time
# in which nobody else in this process gets anything done. So these are written by hand.


def _counters(totals: Totals) -> Iterator[str]:
    types = sorted({type for name, type, _ in totals if name == tallies.SUBMITS})
    known: dict[str, list[tuple[str, str]]] = {
        tallies.SUBMITS: [(type, "") for type in types],
        tallies.FINISHES: [(type, status) for type in types for status in tallies.STATUSES],
        tallies.RETRIES: [("", reason) for reason in tallies.REASONS],
        tallies.RECLAIMS: [("", outcome) for outcome in tallies.OUTCOMES.values()],
    }
    for name, (text, labels) in COUNTERS.items():
        yield from _head(name, text, "counter")
        counted = {(type, label) for of, type, label in totals if of == name}
        for type, label in sorted({*known[name], *counted}):
            values = [_escaped(value) for value in (type, label) if value]
            pairs = sorted(f'{key}="{value}"' for key, value in zip(labels, values, strict=True))
            yield f"{_PREFIX}_{name}{{{','.join(pairs)}}} {totals.get((name, type, label), 0.0)!r}"


def _histograms(totals: Totals) -> Iterator[str]:
    by_name: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (name, type, label), value in totals.items():
        by_name[name][type][label] = value
    for name, (text, _) in HISTOGRAMS.items():
        yield from _head(name, text, "histogram")
        for type, counted in sorted(by_name[name].items()):
            of_type, count = f'type="{_escaped(type)}"', 0.0
            for bucket in tallies.BUCKETS:
                count += counted.get(bucket, 0.0)
                yield f'{_PREFIX}_{name}_bucket{{le="{bucket}",{of_type}}} {count!r}'
            yield f"{_PREFIX}_{name}_count{{{of_type}}} {count!r}"
            yield f"{_PREFIX}_{name}_sum{{{of_type}}} {counted.get(tallies.SUM, 0.0)!r}"


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {_PREFIX}_{name} {text}", f"# TYPE {_PREFIX}_{name} {kind}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def own() -> bytes:
    """What this process counted, in Prometheus' text format."""
    return generate_latest(REGISTRY)


def of_cluster(readings: Readings) -> bytes:
    """What was read about the cluster, in the same format."""
    return _text(_Once(readings))


def of_batches() -> bytes:
    """What workers told of their batches, in the same format."""
    return _text(_batch_sizes)


def _text(collector: Collector) -> bytes:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


def of_jobs(totals: Totals) -> bytes:
    """What the leader counted of jobs, in the same format."""
    return "".join(f"{line}\n" for line in (*_counters(totals), *_histograms(totals))).encode()


__all__ = [
    "CLUSTER",
    "CONTENT_TYPE",
    "COUNTERS",
    "HISTOGRAMS",
    "REGISTRY",
    "Readings",
    "admission_decided",
    "batched",
    "duty",
    "duty_failed",
    "expect_duties",
    "leading",
    "lease_decided",
    "of_batches",
    "of_cluster",
    "of_jobs",
    "own",
    "recovered",
]
