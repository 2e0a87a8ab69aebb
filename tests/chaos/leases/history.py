"""What happened in a run, by this process's monotonic clock. Times of questions are those before they were sent."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.leases import lease_name, token_hash


class Violation(NamedTuple):
    invariant: str
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


@dataclass(frozen=True)
class Grant:
    token: str
    client: int
    uuids: tuple[str, ...]
    memory_mb: int
    ttl_s: float
    asked: float
    answered: float

    @property
    def name(self) -> str:
        """What the system calls this lease where people read it."""
        return lease_name(token_hash(self.token))


class Beat(NamedTuple):
    grant: Grant
    sent: float
    answered: float
    status: int
    #: Whether the client had renewed in time, until the answer came.
    in_time: bool
    #: What the system says about a refusal.
    why: str = ""


@dataclass
class Outage:
    """A fault of some cards. Each time is that of the moment from which, or before which, it is certain."""

    fault: str
    uuids: tuple[str, ...]
    began: float
    #: The database has closed the gate.
    seen: float | None = None
    #: No lease is left on the cards; asked only where the cards are lost.
    revoked: float | None = None
    mended: float | None = None


class Quarantine(NamedTuple):
    uuid: str
    reason: str
    seen: float


@dataclass
class History:
    grants: list[Grant] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    quarantines: list[Quarantine] = field(default_factory=list)
    #: Names of leases whose holders kept the memory for longer after their end than anybody is patient.
    kept: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    incidents: list[Violation] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def incident(self, invariant: str, text: str) -> None:
        """Something that must not be seen at any moment; told once, however often it is seen."""
        with self._lock:
            if Violation(invariant, text) not in self.incidents:
                self.incidents.append(Violation(invariant, text))
