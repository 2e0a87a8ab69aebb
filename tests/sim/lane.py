"""A lane in memory: the publisher's and the store's steps with the very functions that they use, and no server."""

from dataclasses import dataclass, field

from orchestrator import ranking
from orchestrator.pace import Pace


@dataclass
class Job:
    number: int
    agent: str
    arrives: float = 0.0
    takes: float = 1.0
    priority: int = 0
    cost: float = 1.0
    deadline: float | None = None
    rank: int = 0
    tag: int = 0
    started: float | None = None

    @property
    def start_by(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - self.takes

    @property
    def waited(self) -> float:
        assert self.started is not None
        return self.started - self.arrives


@dataclass
class Lane:
    weights: dict[str, float] = field(default_factory=dict)
    virtual_time: int = 0
    accounts: dict[str, int] = field(default_factory=dict)
    ready: list[Job] = field(default_factory=list)

    def submit(self, batch: list[Job]) -> None:
        """As `store.accounts` ranks a submission."""
        by_agent: dict[str, list[Job]] = {}
        for job in batch:
            by_agent.setdefault(job.agent, []).append(job)
        for agent, own in by_agent.items():
            begin = ranking.opened(self.virtual_time, self.accounts.get(agent, 0))
            charges = [ranking.charge(job.cost, self.weights.get(agent, 1.0)) for job in own]
            for job, tag in zip(own, ranking.tags(begin, charges), strict=True):
                job.tag, job.rank = tag, ranking.rank(tag, job.priority)
                self.accounts[agent] = tag
        self.ready += batch

    def take(self, limit: int, urgent: int = 0, before: float = float("-inf")) -> list[Job]:
        """As `store.outbox.take`: `urgent` places for jobs that must start before a moment, the others by rank."""
        pressed = sorted((job for job in self.ready if job.start_by <= before), key=lambda job: job.start_by)[:urgent]
        others = sorted((job for job in self.ready if job not in pressed), key=lambda job: job.rank)
        ranked = others[: limit - len(pressed)]
        self.ready = others[len(ranked) :]
        if ranked:
            reached = max(ranking.reached(job.rank, job.priority) for job in ranked)
            self.virtual_time = max(self.virtual_time, reached)
        return pressed + ranked


@dataclass
class Publisher:
    """As `orchestrator.publisher.Publisher.publish`."""

    lane: Lane
    pace: Pace
    least: int = 2
    most: int = 4096
    stream: list[Job] = field(default_factory=list)

    def publish(self, now: float) -> None:
        room = self.pace.room(len(self.stream), self.least, self.most, now)
        if not room:
            return
        urgent = ranking.urgent_places(room, self.pace.ahead)
        before = now + self.pace.horizon_s
        taken = self.lane.take(room, urgent, before)
        self.stream += taken
        pressed = sum(job.start_by <= before for job in taken[:urgent])
        self.pace.filled(len(taken), pressed, now)
