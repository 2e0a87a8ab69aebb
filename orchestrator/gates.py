"""Gates: what lets a job pass, and what keeps it waiting. Pure, and the same for submits and for the leader.

They stand one behind the other (`STAGES`): who left one meets the next ones, and none twice. Unknown is not zero: a
gate of which nobody knows what it measures is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from orchestrator.errors import AgentLimit, GateClosed, Overloaded, QueueFull
from orchestrator.policies import Action, AgentPolicy, Book, Capacity, MemoryGate

#: What jobs wait for at gates, as `blocked_on` says it; those that end in a colon have a name behind it.
AGENT, DEPTH, MEMORY, LANE, QUIET, CAPACITY, LARGE = (
    "agent-limit:",
    "gate:queue_depth:",
    "gate:gpu_memory",
    "gate:lane:",
    "quiet",
    "capacity",
    "capacity:large",
)
#: What a job is told that the leader has not looked at yet.
UNTIL_QUIET = "waits until it is quiet; `gpuorch queue gates` shows how far it is from that"
FOR_UNITS = "waits for units of the capacity; `gpuorch queue gates` shows how many are in use"
FOR_PLACE = "waits until its agent has fewer jobs in flight; `gpuorch queue gates` shows its marks"

#: A gate that closed opens so many percent below what closed it.
MARGIN_PCT = 5.0
#: Seconds after which a refused job is worth another try, where nothing better is known.
RETRY_S = 5.0
#: Between these lies what is computed.
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
#: Units are sums of decimals.
ROUNDING = 1e-9


def waits_at(blocked_on: str, key: str) -> bool:
    """Whether that is what jobs with this key wait for."""
    return blocked_on.startswith(key) if key.endswith(":") else blocked_on == key


# ── what is known ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Asked:
    """What gates look at of a job."""

    lane: str = "default"
    agent: str = "anonymous"
    type: str = "echo"
    model_id: str | None = None
    #: Not said is not none: a handler may need memory that the job does not mention.
    needs_memory: bool = True
    cpu_fallback: bool = False
    cost_units: float = 0.0
    quiet: bool = False
    #: It waits for its time first; who lets it go then asks about units and quiet.
    later: bool = False
    #: Why it could not start whatever it is given now: it takes no units from those who can.
    stopped: Closed | None = None


@dataclass(frozen=True)
class GateState:
    """A gate between two looks. `since`: what decides about it has been so since then; None: it is not, or unknown."""

    closed: bool
    since: datetime | None = None
    reason: str = ""


@dataclass
class Waiting:
    """Jobs that wait in a lane, at least, and how many of its jobs end in a second, if that was seen."""

    count: int = 0
    ended_per_s: float | None = None


@dataclass
class Use:
    """What an agent has in flight."""

    jobs: int = 0
    memory_mb: int = 0
    #: It went above one of its marks and was not below all of them since.
    closed: bool = False


@dataclass(frozen=True)
class Quiet:
    so: bool
    reason: str


@dataclass
class Standing:
    """What gates know at a moment. Whoever lets a job in counts it here, so that one look serves many."""

    book: Book
    #: None: nobody has looked lately.
    memory: GateState | None = None
    lanes: dict[str, Waiting] = field(default_factory=dict)
    agents: dict[str, Use] = field(default_factory=dict)
    # The leader's.
    quiet: Quiet = field(default_factory=lambda: Quiet(so=False, reason="nobody looked yet"))
    used_units: float = 0.0
    #: Somebody waits for units already: nobody may take them away from under him.
    spoken_for: bool = False

    def lane(self, name: str) -> Waiting:
        return self.lanes.setdefault(name, Waiting())

    def agent(self, name: str) -> Use:
        return self.agents.setdefault(name, Use())


# ── gates with a memory ───────────────────────────────────────────────────────────────────────────────────────────────


def memory_gate(policy: MemoryGate, before: GateState | None, used_pct: float | None, now: datetime) -> GateState:
    """Closed after `for_seconds` above the limit, and then until it is a margin below."""
    if used_pct is None:
        return GateState(closed=True, reason="no GPU was sampled lately, so nobody knows how full they are")
    over = used_pct > policy.over_pct
    told = f"{used_pct:.0f} % of the GPU memory is used, the limit is {policy.over_pct:g} %"
    was = before or GateState(closed=False)
    if was.closed and was.since is not None:
        still = used_pct > policy.over_pct - MARGIN_PCT
        return GateState(still, was.since if still else None, told)
    since = (was.since or now) if over else None
    long_enough = since is not None and now - since >= timedelta(seconds=policy.for_seconds)
    # Closed because nothing was known, and now it is known to be too much: there was no moment at which it was open.
    return GateState(over and (long_enough or was.closed), since, told)


def load_gate(policy: Capacity, before: GateState | None, load_pct: float | None, now: datetime) -> GateState:
    """Open, which means quiet, after so many seconds of low load. What is not measured is not low."""
    if load_pct is None:
        return GateState(closed=True, reason="no GPU told lately how busy it is")
    low = load_pct < policy.load_below_pct
    since = ((before and before.since) or now) if low else None
    long_enough = since is not None and now - since >= timedelta(seconds=policy.load_for_seconds)
    wanted = f"below {policy.load_below_pct:g} % for {policy.load_for_seconds:g} s is quiet"
    return GateState(not long_enough, since, f"GPUs are {load_pct:.0f} % busy; {wanted}")


def agent_gate(policy: AgentPolicy, use: Use) -> GateState:
    """An agent's, after it was closed: open when all it has is at or below its low marks."""
    for has, high, low, what in (
        (use.jobs, policy.max_in_flight, policy.low_in_flight, "jobs in flight"),
        (use.memory_mb, policy.max_memory_mb, policy.low_memory_mb, "MB of GPU memory"),
    ):
        mark = low if low is not None else None if high is None else high * 9 // 10
        if mark is not None and has > mark:
            return GateState(closed=True, reason=f"{has} {what}; closed above {high} until no more than {mark}")
    return GateState(closed=False)


def quiet_now(policy: Capacity | None, load: GateState | None, now: datetime) -> Quiet:
    """By the schedule, or by the load."""
    if policy is None or not (policy.quiet or policy.follow_load):
        return Quiet(so=False, reason="nobody said when it is quiet: the admission policy has no quiet hours")
    if any(hours.contains(now) for hours in policy.quiet):
        return Quiet(so=True, reason="quiet by the schedule")
    if policy.follow_load and load is not None and not load.closed:
        return Quiet(so=True, reason=f"quiet by the load: {load.reason}")
    told = load.reason if policy.follow_load and load is not None else "not within the quiet hours"
    return Quiet(so=False, reason=told)


# ── one gate, one job ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Closed:
    """A gate that does not let a job pass: what it does with it, what it waits for, and what it is told."""

    action: Action
    key: str
    refusal: Overloaded

    @property
    def reason(self) -> str:
        return self.refusal.message


def over_mark(policy: AgentPolicy, use: Use) -> str | None:
    """What an agent has so much of that its gate closes."""
    if policy.max_in_flight is not None and use.jobs >= policy.max_in_flight:
        return f"{use.jobs} jobs in flight; at most {policy.max_in_flight}"
    if policy.max_memory_mb is not None and use.memory_mb > policy.max_memory_mb:
        return f"{use.memory_mb} MB of GPU memory in use; at most {policy.max_memory_mb}"
    return None


def _agent_limit(asked: Asked, standing: Standing) -> Closed | None:
    policy = standing.book.agent(asked.agent)
    if not policy.limits:
        return None
    use = standing.agent(asked.agent)
    counts = use if asked.needs_memory else replace(use, memory_mb=0)
    reason = over_mark(policy, counts)
    if reason is None and use.closed and (state := agent_gate(policy, counts)).closed:
        reason = state.reason
    if reason is None:
        return None
    return Closed(policy.action, f"{AGENT}{asked.agent}", AgentLimit(f"agent {asked.agent!r}: {reason}", RETRY_S))


def _queue_depth(asked: Asked, standing: Standing) -> Closed | None:
    policy = standing.book.admission.queue_depth
    limit = policy.limit(asked.lane) if policy else None
    if policy is None or limit is None or asked.later:
        return None
    waiting = standing.lane(asked.lane)
    if waiting.count < limit:
        return None
    told = f"lane {asked.lane!r} has {waiting.count} jobs waiting; at most {limit}"
    pause_s = retry_after(waiting.count - limit + 1, waiting.ended_per_s)
    return Closed(policy.action, f"{DEPTH}{asked.lane}", QueueFull(told, pause_s))


def _gpu_memory(asked: Asked, standing: Standing) -> Closed | None:
    policy = standing.book.admission.gpu_memory
    if policy is None or asked.later or not asked.needs_memory:
        return None
    state = standing.memory or GateState(closed=True, reason="nobody looked at the GPUs lately; is there a leader?")
    if not state.closed:
        return None
    hint = "a job that needs no GPU says min_memory_mb 0"
    return Closed(policy.action, MEMORY, GateClosed(f"gate gpu_memory is closed: {state.reason}; {hint}", RETRY_S))


def _quiet(asked: Asked, standing: Standing) -> Closed | None:
    if not asked.quiet or asked.later:
        return None
    if asked.stopped or standing.quiet.so:
        return asked.stopped
    return Closed("queue", QUIET, Overloaded(f"waits until it is quiet: {standing.quiet.reason}"))


def _capacity(asked: Asked, standing: Standing) -> Closed | None:
    policy = standing.book.admission.capacity
    if policy is None or not asked.cost_units or asked.later:
        return None
    if asked.stopped:
        return asked.stopped
    there = policy.now(quiet=standing.quiet.so)
    told = f"costs {asked.cost_units:g} units; {standing.used_units:g} of {there:g} are in use"
    if asked.cost_units > there + ROUNDING:
        return Closed("queue", LARGE, Overloaded(f"{told}: more than there are now"))
    if standing.spoken_for or standing.used_units + asked.cost_units > there + ROUNDING:
        return Closed("queue", CAPACITY, Overloaded(told))
    return None


def retry_after(excess: int, per_s: float | None) -> float:
    """Seconds until so many jobs have ended, at the speed that was seen."""
    return min(max(excess / per_s, RETRY_MIN_S), RETRY_MAX_S) if per_s else RETRY_S


#: The gates in the order in which a job meets them, each with the keys of its waiting jobs.
STAGES: tuple[tuple[Callable[[Asked, Standing], Closed | None], tuple[str, ...]], ...] = (
    (_agent_limit, (AGENT,)),
    (_queue_depth, (DEPTH,)),
    (_gpu_memory, (MEMORY,)),
    (_quiet, (QUIET, LANE)),
    (_capacity, (CAPACITY, LARGE)),
)
#: How many of them decide at the submit; the others are the leader's alone.
AT_SUBMIT = 3
