"""Replays requests through the production decision: one pool per model, one lane per pool, one worker per GPU.

Time passes from event to event; the decision is made at every bell (a job that no worker of its pool will take, a
worker without work) and, while jobs wait, every few seconds, as the leader does.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from orchestrator.placement import Ask, Cluster, GpuView
from orchestrator.warmth import Average, Decision, Pool, Rate, State, Terms, Worker, decide
from tests.sim.queues import Loads, Replay
from tests.sim.requests import Request

#: One model fills a GPU.
GPU_MB = 1000
GPUS_OF_A_NODE = 8
#: Seconds between two decisions without a bell. The leader is quicker; it would only take the replay longer.
TICK_S = 5.0

TERMS = Terms()
Decide = Callable[[list[Pool], list[Worker], Cluster, Terms], Decision]


@dataclass(eq=False)
class Slot:
    """A GPU with a model."""

    gpu: int
    lane: "Lane"
    state: State
    since_s: float
    loaded_s: float = inf
    leaving: bool = False
    run_s: float = 0.0


@dataclass(eq=False)
class Lane:
    model: str
    load_s: float
    waiting: deque[Request] = field(default_factory=deque)
    slots: list[Slot] = field(default_factory=list)
    arrivals: Rate = field(default_factory=Rate)
    run: Average = field(default_factory=lambda: Average(30.0))

    def pool(self, now_s: float, most: int) -> Pool:
        return Pool(
            self.model,
            Ask(GPU_MB),
            max_workers=most,
            waiting=len(self.waiting),
            oldest_wait_s=now_s - self.waiting[0].at_s if self.waiting else 0.0,
            arrivals_per_s=self.arrivals.per_s(now_s),
            run_s=self.run.value,
            load_s=self.load_s,
        )


class Simulation:
    def __init__(self, gpus: int, load_s: Loads, terms: Terms = TERMS, decide: Decide = decide) -> None:
        self.slots: list[Slot | None] = [None] * gpus
        self.lanes = {model: Lane(model, seconds) for model, seconds in load_s.items()}
        self.terms = terms
        self.decide = decide
        self.now_s = 0.0
        self.waiting = self.loads = self.decisions = 0
        self.waits_s: list[float] = []
        self.busy_s = self.cpu_s = 0.0
        self._events: list[tuple[float, int, Slot]] = []

    def replay(self, some: list[Request]) -> Replay:
        arrivals, tick_s = deque(some), inf
        while arrivals or self._events or self.waiting:
            arrival_s = arrivals[0].at_s if arrivals else inf
            event_s = self._events[0][0] if self._events else inf
            self.now_s = min(arrival_s, event_s, tick_s)
            if self.now_s == arrival_s:
                bell = self._arrive(arrivals.popleft())
            elif self.now_s == event_s:
                bell = self._free(heapq.heappop(self._events)[2])
            else:
                bell, tick_s = True, inf
            if bell and self.waiting:
                self._act()
            tick_s = min(tick_s, self.now_s + TICK_S) if self.waiting else inf
        return Replay(self.waits_s, self.loads, self.busy_s / (len(self.slots) * self.now_s))

    def _arrive(self, one: Request) -> bool:
        lane = self.lanes[one.model]
        lane.arrivals.add(self.now_s)
        lane.waiting.append(one)
        self.waiting += 1
        idle = [slot for slot in lane.slots if slot.state is State.IDLE and not slot.leaving]
        if idle:
            self._run(max(idle, key=lambda slot: slot.since_s))
        return not lane.slots

    def _free(self, slot: Slot) -> bool:
        """Its load or its job is over."""
        if slot.state is State.BUSY:
            slot.lane.run.add(slot.run_s)
        else:
            slot.loaded_s = self.now_s
        slot.state, slot.since_s = State.IDLE, self.now_s
        if slot.leaving:
            self._vacate(slot)
        elif slot.lane.waiting:
            self._run(slot)
            return False
        return True

    def _run(self, slot: Slot) -> None:
        one = slot.lane.waiting.popleft()
        self.waiting -= 1
        self.waits_s.append(self.now_s - one.at_s)
        slot.state, slot.run_s = State.BUSY, one.run_s
        self._occupy(slot, one.run_s)

    def _occupy(self, slot: Slot, seconds: float) -> None:
        self.busy_s += seconds
        heapq.heappush(self._events, (self.now_s + seconds, slot.gpu, slot))

    def _vacate(self, slot: Slot) -> None:
        self.slots[slot.gpu] = None
        slot.lane.slots.remove(slot)

    def _act(self) -> None:
        """Until nobody leaves who does so at once: then there is room, and the next bell rings."""
        while self._carry_out(self._decision()):
            pass

    def _decision(self) -> Decision:
        pools = [lane.pool(self.now_s, len(self.slots)) for lane in self.lanes.values() if lane.waiting or lane.slots]
        workers = [self._worker(slot) for slot in self.slots if slot]
        cluster = self._cluster()
        began = time.process_time()
        decision = self.decide(pools, workers, cluster, self.terms)
        self.cpu_s += time.process_time() - began
        self.decisions += 1
        return decision

    def _worker(self, slot: Slot) -> Worker:
        idle_s = self.now_s - slot.since_s if slot.state is State.IDLE else 0.0
        resident_s = max(self.now_s - slot.loaded_s, 0.0)
        gpus = (str(slot.gpu),)
        return Worker(str(slot.gpu), slot.lane.model, gpus, GPU_MB, slot.state, idle_s, resident_s, slot.leaving)

    def _cluster(self) -> Cluster:
        return Cluster(
            GpuView(str(gpu), str(gpu // GPUS_OF_A_NODE), gpu % GPUS_OF_A_NODE, GPU_MB, GPU_MB if slot else 0, 0)
            for gpu, slot in enumerate(self.slots)
        )

    def _carry_out(self, decision: Decision) -> bool:
        for start in decision.starts:
            self._load(start.pool_id, int(start.placed.gpus[0].gpu_uuid))
        for leave in decision.leaves:
            slot = self.slots[int(leave.key)]
            assert slot and slot.state is not State.LOADING and (slot.state is State.IDLE) == leave.idle
            slot.leaving = True
            if leave.idle:
                self._vacate(slot)
        return any(leave.idle for leave in decision.leaves)

    def _load(self, model: str, gpu: int) -> None:
        lane = self.lanes[model]
        slot = Slot(gpu, lane, State.LOADING, self.now_s)
        assert self.slots[gpu] is None
        self.slots[gpu] = slot
        lane.slots.append(slot)
        self.loads += 1
        self._occupy(slot, lane.load_s)
