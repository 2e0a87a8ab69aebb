"""What a GPU lease is: the request, the two answers to it, and the secret that proves it."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from datetime import datetime

#: Seconds after which a denied request is worth trying again.
RETRY_AFTER_S = 1.0


def new_token() -> str:
    return secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """What the database keeps of a token: enough to recognise it, useless to a reader."""
    return hashlib.sha256(token.encode()).hexdigest()


#: Begins the key of a job's own lease, JOB_LEASE + job id + ":" + attempt. No token hashes to a text with colons.
JOB_LEASE = "job:"


def job_lease_key(job_id: str, attempt: int) -> str:
    return f"{JOB_LEASE}{job_id}:{attempt}"


def lease_name(key: str) -> str:
    """What people may see of a lease: enough to tell leases apart, never enough to use one."""
    return key if key.startswith(JOB_LEASE) else key[:12]


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
    token: str = field(default_factory=new_token, repr=False)

    @property
    def key(self) -> str:
        """What the database knows the lease by."""
        return token_hash(self.token) if self.job_id is None else job_lease_key(self.job_id, self.attempt)


@dataclass(frozen=True)
class GpuShare:
    gpu_uuid: str
    gpu_index: int


@dataclass(frozen=True)
class Granted:
    request: LeaseRequest
    mode: str
    node_id: str | None
    gpus: tuple[GpuShare, ...]
    expires_at: datetime

    @property
    def key(self) -> str:
        return self.request.key


@dataclass(frozen=True)
class Denied:
    reason: str
    retry_after_s: float = RETRY_AFTER_S
