"""Prometheus metrics, named as in the contract. Other modules say what happened; names and labels stay here.

Counters and histograms count what this process did. Gauges describe the cluster and are read from the database
when somebody asks, so every instance shows the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Info

from orchestrator import __version__

_PREFIX = "gpu_orchestrator"

_leader = Gauge("leader", "1 while this instance leads.", ["holder"], namespace=_PREFIX)
_duty_seconds = Histogram("duty_seconds", "Time a leader's duty took.", ["duty"], namespace=_PREFIX)
_duty_failures = Counter("duty_failures_total", "Runs of a duty that failed.", ["duty"], namespace=_PREFIX)
_submitted = Counter("jobs_submitted_total", "Jobs accepted by this instance.", ["type"], namespace=_PREFIX)
_lease_decisions = Counter(
    "lease_decisions_total", "Answers to lease requests by this instance.", ["decision", "reason"], namespace=_PREFIX
)
_build = Info("build", "The version that runs.", namespace=_PREFIX)
_build.info({"version": __version__})

#: Job types come from clients; beyond this many they share one label, so that nobody can fill the memory.
MAX_TYPES = 200
_types: set[str] = set()


def leading(holder: str, leads: bool) -> None:  # noqa: FBT001 - the gauge's value
    _leader.labels(holder).set(int(leads))


@contextmanager
def duty(name: str) -> Iterator[None]:
    with _duty_seconds.labels(name).time():
        yield


def duty_failed(name: str) -> None:
    _duty_failures.labels(name).inc()


def submitted(job_type: str, count: int) -> None:
    _submitted.labels(_bounded(job_type)).inc(count)


def lease_decided(decision: str, reason: str) -> None:
    _lease_decisions.labels(decision, reason).inc()


def _bounded(job_type: str) -> str:
    if len(_types) < MAX_TYPES:
        _types.add(job_type)
    return job_type if job_type in _types else "other"


__all__ = ["REGISTRY", "duty", "duty_failed", "leading", "lease_decided", "submitted"]
