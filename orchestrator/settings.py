"""Every setting, in one frozen object, and how they must relate.

What single ones must be says `orchestrator.setting_values`. `orchestrator.config` reads them, once at start.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from orchestrator.names import NewName
from orchestrator.setting_values import (
    Bytes,
    Count,
    DatabaseUrl,
    Directory,
    FilePath,
    GpuBackend,
    Host,
    HttpUrl,
    LockName,
    LogFormat,
    LogLevel,
    Millis,
    Modules,
    OtlpUrl,
    Percent,
    PlacementPolicy,
    PodName,
    Port,
    Prefix,
    RedisUrl,
    RetryRules,
    Seconds,
    SecondsOrZero,
    UpTo100,
    UpTo512,
)

#: Where Kubernetes puts what a pod needs to speak to it.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DATA_DIR = Path(".data")
SECRET = frozenset({"database_url", "redis_url"})
#: A job's lease lives so many times as long as its worker may be silent, at least.
LEASE_OVER_TIMEOUT = 1.25
#: Seconds; more than sessions wait for a row (a second at least), so that a row which is held is no broken connection.
SHORTEST_HEARTBEAT_LIMIT_S = 2.0
#: Seconds, beyond the grace of its jobs, in which a worker that stops writes down what they did.
LONGEST_CLOSING_S = 15.0

# The password runs to the LAST @, so that one with a raw @ or / is masked whole; hiding a part of the host as
# well is the cheaper mistake.
_USERINFO = re.compile(r"^((?:[A-Za-z][A-Za-z0-9+.-]*://)?+[^:@]*):.*@", re.DOTALL)
# Names of other arguments are taken as a whole too, so that none of their characters is looked at twice. One with a %
# may be any of them.
_QUERY = re.compile(
    r"([?&](?:(?!pass|pwd|secret|token|%)[^=&])*+(?:pass|pwd|secret|token|%)[^=&]*+=)[^&]*+|[?&][^=&]*+", re.IGNORECASE
)


def safe_url(url: str) -> str:
    """The URL with its password masked, also when the URL is malformed."""
    return _QUERY.sub(lambda found: f"{found[1]}***" if found[1] else found[0], _USERINFO.sub(r"\1:***@", url))


def database_file(data_dir: Path) -> Path:
    return data_dir / "orchestrator.db"


def database_in(data_dir: Path) -> str:
    return f"sqlite:///{database_file(data_dir)}"


def _is(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Settings(BaseModel):
    """Values and how they must relate; nothing here probes, creates or connects."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    database_url: DatabaseUrl = _is(database_in(DATA_DIR), "the truth: SQLite file (by default in data_dir) or MariaDB")
    redis_url: RedisUrl = _is("redis://127.0.0.1:6379/0", "the delivery: Redis or Valkey")
    host: Host = _is("127.0.0.1", "address the API listens on; loopback only in this version")
    port: Port = _is(8008, "port the API listens on; 0 picks a free one")
    data_dir: Directory = _is(DATA_DIR, "directory of the embedded servers and of local files")
    stream_prefix: Prefix = _is("stream:orchestrator:", "what the name of every stream begins with")
    claim_idle_ms: Millis = _is(10_000, "a delivered entry idle for this long is looked at by the leader")
    job_retry_max: UpTo100 = _is(5, "attempts of a job that does not say max_attempts itself")
    max_crashes: UpTo100 = _is(2, "a job that killed this many workers is dead-lettered")
    retry_base_s: Seconds = _is(1.0, "the first retry waits up to this; it doubles with each attempt")
    retry_cap_s: Seconds = _is(300.0, "longest wait before a retry")
    retry_by_type: RetryRules = _is({}, "max_attempts, base_s and cap_s of single job types; JSON in the environment")
    redrive_max: Count = _is(3, "times a job that ended badly may be started over by an operator")
    cancel_step_s: Seconds = _is(5.0, "time a cancelled job gets after being asked, and again after SIGTERM")
    leader_lock: LockName = _is(
        "gpu_orchestrator_leader", "name of the leader's lock, in lower case; MariaDB's has its database in it"
    )
    leader_ttl_s: Seconds = _is(10.0, "a leader that does not renew for this long is replaced")
    leader_interval_s: Seconds = _is(0.5, "how often a candidate tries and a leader renews")
    leader_trust_margin_s: Seconds = _is(2.0, "a leader stops trusting its term this long before it expires")
    lease_ttl_s: Seconds = _is(60.0, "how long a client's GPU lease lives without a heartbeat, by default")
    lease_ttl_max_s: Seconds = _is(86_400.0, "longest lease a client may ask for")
    worker_timeout_s: Seconds = _is(10.0, "a worker silent for this long is dead")
    worker_heartbeat_s: Seconds = _is(2.0, "at most this long between two signs of life of a worker")
    worker_slots: UpTo512 = _is(4, "jobs that one worker runs at the same time")
    worker_grace_s: SecondsOrZero = _is(5.0, "time running jobs get at SIGTERM before they are handed back")
    worker_pool: NewName | None = _is(None, "pool whose lane the worker serves; absent: the default lane")
    node_id: NewName | None = _is(None, "name of this machine among the nodes; absent: its host name")
    worker_handlers: Modules = _is((), "modules that hold handlers; comma separated in the environment")
    gpu_backend: GpuBackend = _is(
        "auto", "auto (nvml if it is installed), nvml, none, or simulated GPUs as sim:NxMB[,NxMB]"
    )
    gpu_mem_gate_pct: UpTo100 = _is(90, "share of a GPU's memory that leases may use, in percent")
    gpu_sample_s: Seconds = _is(1.0, "how often GPUs are measured")
    gpu_stale_s: Seconds = _is(5.0, "a GPU not measured for this long grants no lease")
    gpu_gate_hysteresis_pct: UpTo100 = _is(5, "a gate that closed opens this many percent below gpu_mem_gate_pct")
    gpu_gate_hold_s: SecondsOrZero = _is(5.0, "a gate stays closed for at least this long")
    gpu_release_s: Seconds = _is(10.0, "memory not given back this long after its lease puts the GPU into quarantine")
    gpu_starvation_s: Seconds = _is(60.0, "a job that found no room for this long gets a GPU reserved")
    placement: PlacementPolicy = _is("fragmentation", "which GPU a lease gets: fragmentation, best_fit or spread")
    resident_min_s: SecondsOrZero = _is(30.0, "a warm model stays at least this long before another may take its room")
    lane_window_min: Count = _is(2, "entries kept published per lane, at least")
    lane_window_max: Count = _is(4096, "entries kept published per lane, at most")
    payload_max_bytes: Bytes = _is(1_048_576, "largest payload and largest result of a job; at most 6 MiB")
    payload_max_depth: UpTo512 = _is(64, "deepest nesting of a payload")
    batch_max_jobs: Count = _is(1000, "most jobs in one batch submit")
    wait_max_s: Seconds = _is(60.0, "longest time a request may wait: for a job to finish, or for one to claim")
    db_pool_size: UpTo512 = _is(
        10, "database connections per process and kind (transactions, reads); twice that under load"
    )
    db_timeout_s: Seconds = _is(10.0, "limit to connect to the database, read, write and wait for a lock")
    redis_block_ms: Millis = _is(2000, "how long one read waits for entries")
    redis_timeout_s: Seconds = _is(5.0, "limit to connect to Redis and for each of its answers")
    publish_interval_s: Seconds = _is(0.5, "how often the leader publishes what others left")
    republish_after_s: Seconds = _is(5.0, "a published job missing in Redis this long is published again")
    reclaim_interval_s: Seconds = _is(1.0, "how often the leader takes jobs back from dead workers")
    reconcile_interval_s: Seconds = _is(
        1.0, "how often the leader compares pools with their workers, and nodes with it"
    )
    pool_drain_s: SecondsOrZero = _is(300.0, "time running jobs get when a pool or node is drained, by default")
    purge_interval_s: Seconds = _is(1.0, "how often the leader removes expired leases")
    retention_jobs_s: SecondsOrZero = _is(
        2_592_000.0, "jobs and workflows are kept this long after their end (30 days); 0: for ever"
    )
    retention_results_s: SecondsOrZero = _is(
        2_592_000.0, "results are kept this long (30 days), and no longer than their jobs; 0: for ever"
    )
    retention_audit_s: SecondsOrZero = _is(7_776_000.0, "rows of the audit are kept this long (90 days); 0: for ever")
    retention_interval_s: Seconds = _is(60.0, "how often the leader looks for what need not be kept any more")
    kubernetes_url: HttpUrl = _is("https://kubernetes.default.svc", "where pools of the provider kubernetes are scaled")
    kubernetes_namespace: NewName = _is(
        "default", "namespace of pod_name, and of Deployments unless a pool says otherwise"
    )
    pod_name: PodName | None = _is(
        None, "name of this worker's pod, whose deletion cost it writes; absent: it runs in none"
    )
    kubernetes_token_file: FilePath = _is(SERVICE_ACCOUNT / "token", "file of the token for it; read for each request")
    kubernetes_ca_file: FilePath = _is(SERVICE_ACCOUNT / "ca.crt", "file of the authority that signed its certificate")
    otlp_endpoint: OtlpUrl | None = _is(
        None, "where spans go, as OTLP over HTTP (http://host:4318); absent: no tracing"
    )
    trace_sample_pct: Percent = _is(
        100.0, "share of submits that are traced, where the caller did not decide, in percent"
    )
    log_format: LogFormat = _is("console", "console for people, json for machines")
    log_level: LogLevel = _is("info", "debug, info, warning, error or critical")

    @model_validator(mode="after")
    def _related(self, info: ValidationInfo) -> Self:
        broken = [] if info.context is FIELDS_ONLY else broken_relations(self)
        if broken:
            raise ValueError("; ".join(broken))
        return self

    @property
    def job_lease_ttl_s(self) -> float:
        """How long a job's lease lives after its worker's last heartbeat: longer than the worker counts as alive.

        And by a beat longer, since slots are told a beat less: who counts as alive keeps its leases.
        """
        return max(LEASE_OVER_TIMEOUT * self.worker_timeout_s, self.worker_timeout_s + self.worker_heartbeat_s)

    @property
    def heartbeat_limit_s(self) -> float:
        """How long a sign of life waits for the database's answer, unless the server is at work for it.

        A connection that died in silence is noticed by nothing else, and its worker must not die of it: a beat, which
        is a third of the time that it may be silent, and this one, at most as long, leave a third to be heard in.
        """
        return min(self.db_timeout_s, max(self.worker_timeout_s / 3, SHORTEST_HEARTBEAT_LIMIT_S))

    @property
    def leave_limit_s(self) -> float:
        """How long a worker that is told to stop takes at most, whatever its servers do: then it is gone.

        Its jobs' grace, and the time to write down what they did, which is short enough for whoever kills after 30 s.
        """
        return self.worker_grace_s + min(4 * self.db_timeout_s, LONGEST_CLOSING_S)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for key, value in super().__repr_args__():
            yield key, safe_url(value) if key in SECRET else value

    def environment(self) -> dict[str, str]:
        """Variables that give a child process these very settings. They hold the passwords."""
        # Always the database: one that is not named lies in the data directory, and need not be this one.
        told = [key for key in FIELDS if key == "database_url" or getattr(self, key) != FIELDS[key].default]
        return {variable(key): to_text(getattr(self, key)) for key in told}


FIELDS = Settings.model_fields
#: Validation context: check each value, but not how they relate; the caller does, knowing which values are doubtful.
FIELDS_ONLY = {"relations": "are checked by the caller"}


# How values must relate.


@dataclass(frozen=True)
class Relation:
    """`short`, taken `times` times, fits into `long` less `reserve` and `margin`; times in ms are read as seconds."""

    short: str
    times: float
    long: str
    why: str
    reserve: str | None = None
    margin: float = 0.0
    unit: str = "s"

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.short, self.long, self.reserve) if key]

    def holds(self, settings: Settings) -> bool:
        room = _number(settings, self.long) - (_number(settings, self.reserve) if self.reserve else 0)
        need = _number(settings, self.short) * self.times + self.margin
        # The billionth: 3 * 0.1 fits into 0.3 despite binary fractions.
        return need <= room + 1e-9

    def message(self, settings: Settings) -> str:
        values = ", ".join(f"{key} = {getattr(settings, key)}" for key in self.keys)
        factor = f" times {self.times:g}" if self.times > 1 else ""
        plus = f" plus {self.margin:g} {self.unit}" if self.margin else ""
        less, or_lower = (f" less {self.reserve}", f" or {self.reserve}") if self.reserve else ("", "")
        rule = f"{self.short}{factor}{plus} must not exceed {self.long}{less}"
        return f"{values}: {rule} ({self.why}); raise {self.long} or lower {self.short}{or_lower}"


RELATIONS = (
    Relation("worker_heartbeat_s", 3, "worker_timeout_s", "two lost heartbeats are no death"),
    Relation("lease_ttl_s", 1, "lease_ttl_max_s", "the default lease must itself be allowed"),
    Relation("gpu_sample_s", 3, "gpu_stale_s", "two lost samples must not close the gate"),
    Relation(
        "gpu_gate_hysteresis_pct",
        1,
        "gpu_mem_gate_pct",
        "a closed gate must open when its GPU is idle, which is never quite empty",
        # What drivers, and a desktop on a small one, use of an idle GPU.
        margin=10,
        unit="%",
    ),
    Relation("leader_interval_s", 3, "leader_ttl_s", "two renewals may be lost", reserve="leader_trust_margin_s"),
    # Its answer comes at the end of BLOCK, and then has its way to us.
    Relation("redis_block_ms", 1, "redis_timeout_s", "an idle read is no dead server", margin=0.5),
    Relation("worker_heartbeat_s", 2, "claim_idle_ms", "an entry is not idle before its owner could say so"),
    Relation("lane_window_min", 1, "lane_window_max", "the window needs room"),
    Relation("retry_base_s", 1, "retry_cap_s", "the first wait is not above the longest"),
    Relation("publish_interval_s", 2, "republish_after_s", "what was just sent must not be sent twice"),
    Relation("retention_results_s", 1, "retention_jobs_s", "a result goes with its job at the latest"),
    # More than `job_lease_ttl_s` can be, which is a timeout and a third.
    Relation("worker_timeout_s", 1.5, "retention_jobs_s", "the lease of a job that is forgotten must be over"),
)


def _number(settings: Settings, key: str) -> float:
    value: float = getattr(settings, key)
    if key.startswith("retention_") and not value:
        return math.inf  # kept for ever
    return value / 1000 if key.endswith("_ms") else value


def broken_relations(settings: Settings, doubtful: Iterable[str] = ()) -> list[str]:
    """A message per broken relation, save those with a key whose value is not really known."""
    unknown = set(doubtful)
    broken = [r.message(settings) for r in RELATIONS if unknown.isdisjoint(r.keys) and not r.holds(settings)]
    return broken + (_broken_rules(settings) if unknown.isdisjoint({"retry_by_type", "retry_base_s"}) else [])


def _broken_rules(settings: Settings) -> list[str]:
    """Rules by type with a longest wait below the first; one that says a longer first wait alone means it."""
    broken = []
    for job_type, rule in settings.retry_by_type.items():
        key, base_s = ("base_s", rule.base_s) if rule.base_s else ("retry_base_s", settings.retry_base_s)
        if rule.cap_s and rule.cap_s < base_s:
            values = f"{key} = {base_s}, cap_s = {rule.cap_s}"
            broken.append(
                f"retry_by_type.{job_type}: {values}: the first wait is not above the longest;"
                " raise cap_s or lower base_s there"
            )
    return broken


# Text, as the environment has it.


def variable(key: str) -> str:
    return f"ORCH_{key.upper()}"


def to_text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, dict):
        return json.dumps({key: rule.model_dump(exclude_none=True) for key, rule in value.items()}) if value else ""
    return "" if value is None else str(value)
