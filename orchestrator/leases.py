"""What a GPU lease is: the request, the two answers to it, and the secret that proves it."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, StrEnum
from functools import cached_property
from typing import NamedTuple, Self

from orchestrator.placement import Ask, GpuView, LastLook, Policy, Reason, RecentAsks
from orchestrator.settings import Settings

#: Seconds after which a denied request is worth trying again, by the reason; a second for all others.
RETRY_AFTER_S = {
    Reason.CONTENDED: 0.1,
    Reason.STALE: 2.0,
    Reason.UNHEALTHY: 10.0,
    Reason.TOO_LARGE: 10.0,
    Reason.QUARANTINED: 30.0,
}


def new_token() -> str:
    return secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """What the database keeps of a token: enough to recognise it, useless to a reader."""
    return hashlib.sha256(token.encode()).hexdigest()


#: Begins the key of a job's own lease, JOB_LEASE + job id + ":" + attempt. No token hashes to a text with colons.
JOB_LEASE = "job:"


#: Begins the key of a warm model's lease. Not the job's: the same id, purged and submitted again, gets that one again.
MODEL_LEASE = "model:"


def model_lease_key(slot: str) -> str:
    return f"{MODEL_LEASE}{slot}:{secrets.token_hex(4)}"


def job_lease_key(job_id: str, attempt: int) -> str:
    return f"{JOB_LEASE}{job_id}:{attempt}"


def lease_name(key: str) -> str:
    """What people may see of a lease: enough to tell leases apart, never enough to use one."""
    return key if key.startswith((JOB_LEASE, MODEL_LEASE)) else key[:12]


@dataclass(frozen=True)
class LeaseRequest:
    agent: str
    memory_mb: int
    ttl_s: float
    gpu_count: int = 1
    cpu_fallback: bool = False
    node_id: str | None = None
    job_id: str | None = None
    attempt: int = 0
    worker_id: str | None = None
    #: The process that will use the memory, with its descendants, as its node knows it.
    pid: int | None = None
    model_id: str | None = None
    gpu_models: frozenset[str] = frozenset()
    host_cpu_milli: int = 0
    host_memory_mb: int = 0
    #: For a model that is loaded before any job: the name of its lease, its slot and the type of its jobs.
    model_key: str | None = None
    slot: str | None = None
    job_type: str | None = None
    pinned: bool = False
    token: str = field(default_factory=new_token, repr=False)

    @cached_property
    def key(self) -> str:
        """What the database knows the lease by."""
        if self.model_key is not None:
            return self.model_key
        return token_hash(self.token) if self.job_id is None else job_lease_key(self.job_id, self.attempt)

    def ask(self, warm_nodes: frozenset[str] = frozenset()) -> Ask:
        """What placement needs to know of it."""
        return Ask(
            self.memory_mb,
            self.gpu_count,
            self.node_id,
            key=self.job_id or "",
            models=self.gpu_models,
            cpu_milli=self.host_cpu_milli,
            host_memory_mb=self.host_memory_mb,
            warm_nodes=warm_nodes,
        )


class LeaseState(StrEnum):
    #: It holds its memory; also while it is ending, which is `ending_as` in its row.
    ACTIVE = "active"
    #: Its client gave it back.
    RELEASED = "released"
    #: Nobody renewed it in time, or its GPU was lost.
    EXPIRED = "expired"
    #: A job's or a warm model's, and over: nobody asks how, so its row need not be kept.
    SPENT = "spent"


LEASE_ENDS = (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.SPENT)


class GpuShare(NamedTuple):
    gpu_uuid: str
    gpu_index: int


class Granted(NamedTuple):
    request: LeaseRequest
    mode: str
    node_id: str | None
    gpus: tuple[GpuShare, ...]
    expires_at: datetime
    #: The lease of a warm model under which a job runs, instead of one of its own.
    resident: str | None = None

    @property
    def key(self) -> str:
        return self.resident or self.request.key


@dataclass(frozen=True)
class Denied:
    reason: str
    code: Reason = Reason.NO_MEMORY
    retry_after_s: float = 1.0
    gpus: tuple[GpuView, ...] = ()
    #: Idle warm models were asked to make room; their workers must hear of it.
    evicting: bool = False

    @property
    def lasts(self) -> bool:
        """Whether asking again does not help until somebody does something. Where GPUs are known, they get free."""
        return self.code is Reason.TOO_LARGE or (self.code is Reason.NO_GPU and not self.gpus)


class Remains(Enum):
    """What is left on the GPU when the job under a lease is over; its worker looked."""

    #: Nothing: the memory is free.
    NOTHING = "nothing"
    #: What was there before, since the job never started: nothing, or the warm model it was to run on.
    UNUSED = "unused"
    #: A model that was loaded just now, before any job: it is idle.
    LOADED = "loaded"
    #: Processes that are on their way out, or that nobody can see: the lease lasts until they are gone.
    PROCESSES = "processes"
    #: A warm model, which keeps the lease for the next job.
    MODEL = "model"
    #: Not this job's to say: it ran in a batch under the lease of another, whose end ends it.
    SHARED = "shared"


@dataclass(frozen=True)
class ResidentSlot:
    """A free slot that keeps a model warm, under a lease of its own."""

    key: str
    type: str
    model_id: str | None
    memory_mb: int
    gpus: tuple[GpuShare, ...]


@dataclass(frozen=True)
class Terms:
    """On which leases are granted."""

    stale_s: float
    policy: Policy = Policy.FRAGMENTATION
    resident_min_s: float = 30.0
    starvation_s: float = 60.0
    recent: RecentAsks = field(default_factory=RecentAsks, compare=False, repr=False)
    last_look: LastLook = field(default_factory=LastLook, compare=False, repr=False)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(settings.gpu_stale_s, Policy(settings.placement), settings.resident_min_s, settings.gpu_starvation_s)
