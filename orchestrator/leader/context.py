"""What duties work with, and what they remember from one run to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.jobs import Queued, RetryPolicy
from orchestrator.leader.apart import Apart
from orchestrator.leader.autosize import Autosize
from orchestrator.leader.replicas import Replicas
from orchestrator.leader.retention import Places
from orchestrator.leader.term import Term
from orchestrator.leader.workflows import Walks
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import gatekeeper, lanes
from orchestrator.store.admission import Admission
from orchestrator.store.policies import Copy
from orchestrator.stream.hub import Hub

#: Rows one transaction of a duty may touch.
BATCH = 500


@dataclass
class DutyContext:
    """What a duty works with. `cursors` remembers, per lane, how far the walk over idle entries has come."""

    term: Term
    hub: Hub
    publisher: Publisher
    settings: Settings
    cursors: dict[str, str] = field(default_factory=dict)
    #: The last lane that a duty looked at.
    looked_at: dict[str, str] = field(default_factory=dict)
    policies: Copy = field(default_factory=Copy)
    #: What the last look at those who wait for caps saw last.
    waited_for: str = ""
    walk: gatekeeper.Walk = field(default_factory=gatekeeper.Walk)
    unfinished: Walks = field(default_factory=dict)
    retained: Places = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.apart = Apart(self.term)
        self.replicas = Replicas(self.settings)
        self.autosize = Autosize(self.settings)
        self.admission = Admission(self.policies)

    @property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy.of(self.settings)

    def lanes(self, duty: str, *queued: Queued) -> set[str]:
        """Of the next lanes that this duty has not looked at for longest, those in which a job waits like that."""
        after = self.looked_at.get(duty, "")
        found, self.looked_at[duty] = self.term.db.read(lambda conn: lanes.some(conn, after, *queued))
        return set(found)
