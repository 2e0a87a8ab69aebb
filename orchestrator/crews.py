"""How many workers of each pool every node should run: a pure plan over one look at pools, nodes and workers.

The plan is level-triggered: it says what should be, not what to do, and from any state repeated plans reach one that
changes nothing. Nodes converge to it by themselves, in any order; whatever dies meanwhile is missing in the next look.

1. How many workers a pool should have now (`wanted`).
2. Those that are where they should be stay: a warm worker is worth more than a better place for it.
3. The missing go where there is room, and where few workers of the pool are.
4. After a change of the model, old workers leave as new ones become ready, and no sooner, unless they hold the very
   memory that the new ones wait for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.placement import Ask, Cluster, Placed, too_large_for_all
from orchestrator.pools import ASLEEP, CHILL, OPEN, STOP, WARM, PoolArrow, PoolState

#: Seconds after which it is written down again that a pool is in use, at most.
MAX_UNNOTED_S = 10.0
#: As many as a pool's row holds.
REASON_CHARACTERS = 255


@dataclass(frozen=True)
class NodeView:
    """A node whose supervisor runs pools. `open`: it lives, and nobody drains it. `types`: what it has handlers for."""

    node_id: str
    open: bool = True
    types: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Crew:
    """The live worker of a pool's revision on one node. `blocked`: its slots wait for GPU memory."""

    worker_id: str
    node_id: str
    revision: int
    slots: int
    busy: int = 0
    #: Slots that are loaded, whether they run a job or not.
    ready: int = 0
    trouble: str | None = None
    blocked: bool = False
    #: It fetches its jobs over HTTP: nobody here started it, and nobody can make it leave.
    fetches: bool = False


#: (node, revision) → workers.
Assignments = dict[tuple[str, int], int]


@dataclass(frozen=True)
class PoolView:
    pool_id: str
    state: PoolState
    revision: int
    desired: int
    minimum: int
    slots: int
    hold_s: float
    provider: str = "local"
    type: str | None = None
    memory_mb: int = 0
    gpu_count: int = 1
    #: Seconds since it last had a job, or was created or changed; and whether it has one now.
    idle_s: float = 0.0
    in_demand: bool = False
    assigned: Assignments = field(default_factory=dict)
    crews: tuple[Crew, ...] = ()
    spawned: int = 0
    reason: str | None = None
    metadata: dict[str, Any] | None = None
    autosize: bool = False
    #: Most workers that it may size itself to.
    maximum: int = 0
    #: By node, slots that were asked to leave: the place of their worker goes with them.
    parting: dict[str, int] = field(default_factory=dict)

    @property
    def ready(self) -> int:
        """Workers of any revision that can take jobs."""
        return sum(crew.ready for crew in self.crews) // self.slots

    @property
    def to_leave(self) -> tuple[Crew, ...]:
        """Who is in the way of the end of a drain: nobody can make HTTP workers leave, and idle ones get no jobs."""
        return tuple(crew for crew in self.crews if crew.busy or not crew.fetches)

    @property
    def in_use(self) -> bool:
        return self.in_demand or any(crew.busy for crew in self.crews)

    @property
    def ask(self) -> Ask:
        return Ask(self.memory_mb, self.gpu_count, key=self.pool_id)


@dataclass(frozen=True)
class Plan:
    """What should be. `arrow` is the state that the pool has reached, None when it stays."""

    pool_id: str
    workers: int
    assigned: Assignments
    spawned: int
    arrow: PoolArrow | None = None
    reason: str | None = None

    def changes(self, pool: PoolView) -> bool:
        """Whether this is anything that nodes or people should hear of."""
        same = (self.assigned, self.spawned, self.reason) == (pool.assigned, pool.spawned, pool.reason)
        return not same or self.arrow is not None

    def is_due(self, pool: PoolView) -> bool:
        """Whether anything must be written: changes, or that a pool in use was so once more."""
        return self.changes(pool) or (pool.in_use and pool.idle_s >= min(pool.hold_s / 10, MAX_UNNOTED_S))


def plan(
    pools: Sequence[PoolView], nodes: Sequence[NodeView], cluster: Cluster, sizes: Mapping[str, int] | None = None
) -> list[Plan]:
    """A plan for each pool, in their order. `sizes` says how many workers pools that size themselves should have."""
    load = Counter({node.node_id: 0 for node in nodes})
    for pool in pools:
        for (node_id, _), count in pool.assigned.items():
            load[node_id] += count
    _count_what_is_coming(pools, cluster)
    return [_plan(pool, nodes, cluster, load, (sizes or {}).get(pool.pool_id)) for pool in pools]


def _count_what_is_coming(pools: Sequence[PoolView], cluster: Cluster) -> None:
    """Workers that are assigned and have no lease yet will take memory that still looks free."""
    for pool in pools:
        if not pool.memory_mb or pool.state not in OPEN:
            continue
        for (node_id, revision), count in pool.assigned.items():
            here = sum(crew.ready for crew in pool.crews if (crew.node_id, crew.revision) == (node_id, revision))
            _take_some(pool, node_id, max(count * pool.slots - here, 0), cluster)


def _take_some(pool: PoolView, node_id: str, slots: int, cluster: Cluster) -> list[Placed]:
    """Take memory there for as many of these slots as find it."""
    ask = pool.ask._replace(node_id=node_id)
    taken: list[Placed] = []
    # Asked first whether it fits: `place` takes the trouble to say why not, which nobody reads here.
    while len(taken) < slots and cluster.fits(ask) and isinstance(placed := cluster.place(ask), Placed):
        cluster.take(ask, placed)
        taken.append(placed)
    return taken


def wanted(pool: PoolView) -> int:
    """Workers that the pool should have: all it is to have while it is in use, the least when it was idle too long."""
    if pool.state not in OPEN:
        return 0
    return pool.desired if pool.in_use or pool.idle_s < pool.hold_s else pool.minimum


def _plan(pool: PoolView, nodes: Sequence[NodeView], cluster: Cluster, load: Counter[str], size: int | None) -> Plan:
    workers = wanted(pool) if size is None or pool.state not in OPEN else size
    assigned, lacking = _assign(pool, workers, nodes, cluster, load)
    arrow = _arrow(pool, workers)
    reason = _reason(pool, workers, lacking, nodes, cluster)
    return Plan(pool.pool_id, workers, assigned, pool.ready, arrow, reason)


def _assign(
    pool: PoolView, workers: int, nodes: Sequence[NodeView], cluster: Cluster, load: Counter[str]
) -> tuple[Assignments, int]:
    """Where its workers should be, and how many found no node."""
    if pool.provider != "local":
        return {}, 0
    if pool.state not in OPEN:
        # Their supervisors read from the pool's row that they must leave, and how soon.
        return (pool.assigned if pool.to_leave else {}), 0
    open_nodes = [node for node in nodes if node.open]
    able = [node for node in open_nodes if pool.type is None or pool.type in node.types]
    current, lacking = _spread(pool, workers, able, cluster, load)
    # The old model may be of another type, which other nodes have.
    return current | _outgoing(pool, workers, current, nodes), lacking


def _spread(
    pool: PoolView, workers: int, able: Sequence[NodeView], cluster: Cluster, load: Counter[str]
) -> tuple[Assignments, int]:
    """Keep what is there, take away what is too much, and find places for the rest."""
    names = {node.node_id for node in able}
    counts = Counter({n: c for (n, revision), c in pool.assigned.items() if revision == pool.revision and n in names})
    while counts.total() > workers:
        counts[_least_useful(pool, counts)] -= 1
    for node_id in [crew.node_id for crew in pool.crews if crew.blocked and crew.revision == pool.revision]:
        # One of which a slot is ready stays: the other half might not find room where it goes, and come back.
        idle = counts[node_id] - math.ceil(_ready_at(pool, node_id) / pool.slots)
        if idle > 0 and _room_elsewhere(pool, node_id, names, cluster):
            counts[node_id] -= 1  # it waits for memory there, and would not elsewhere
    rooms: dict[str, int] = {}
    while counts.total() < workers and names:
        chosen = _place(pool, names, counts, cluster, load, rooms)
        counts[chosen] += 1
        load[chosen] += 1
    assigned = {(node_id, pool.revision): count for node_id, count in counts.items() if count}
    return assigned, workers - counts.total()


def _least_useful(pool: PoolView, counts: Counter[str]) -> str:
    """The node from which a worker is missed least: leaving, not ready, idle before others; then the fuller one."""
    busy = Counter({crew.node_id: crew.busy for crew in pool.crews if crew.revision == pool.revision})
    some = [node_id for node_id, count in counts.items() if count]
    return min(
        some,
        key=lambda n: (
            not pool.parting.get(n),
            _ready_at(pool, n) >= counts[n] * pool.slots,
            busy[n] / counts[n],
            -counts[n],
            n,
        ),
    )


def _ready_at(pool: PoolView, node_id: str) -> int:
    return sum(crew.ready for crew in pool.crews if (crew.node_id, crew.revision) == (node_id, pool.revision))


def _room_elsewhere(pool: PoolView, node_id: str, names: set[str], cluster: Cluster) -> bool:
    if not pool.memory_mb:
        return False  # only its handler knows how much it needs: it would go round and round
    others = sorted(names - {node_id})
    return any(isinstance(cluster.place(pool.ask._replace(node_id=other)), Placed) for other in others)


def _place(
    pool: PoolView, names: set[str], counts: Counter[str], cluster: Cluster, load: Counter[str], rooms: dict[str, int]
) -> str:
    """Where there is room, else where it may be made; then where few of the pool's workers are, and few at all.

    `rooms` remembers what was found from one worker to the next: a full cluster is not looked through for each.
    """
    by_load = sorted(names, key=lambda node_id: (counts[node_id], load[node_id], node_id))
    if not pool.memory_mb:
        return by_load[0]
    for node_id in by_load:
        if node_id not in rooms:
            rooms[node_id] = _room(pool, node_id, cluster)
        if rooms[node_id] == pool.slots:
            break
    chosen = max(by_load, key=lambda node_id: rooms.get(node_id, 0))
    _take_some(pool, chosen, pool.slots, cluster)
    del rooms[chosen]
    return chosen


def _room(pool: PoolView, node_id: str, cluster: Cluster) -> int:
    """How many slots of a new worker would find memory there."""
    taken = _take_some(pool, node_id, pool.slots, cluster)
    for placed in taken:
        cluster.free({gpu.gpu_uuid for gpu in placed.gpus}, pool.memory_mb, node_id)
    return len(taken)


def _outgoing(pool: PoolView, workers: int, current: Assignments, nodes: Sequence[NodeView]) -> Assignments:
    """What stays of older revisions: as much as the new one lacks. Those that are ready stay longest, node by node.

    While the new one waits for memory, one more leaves each time that none is on its way out: one need not be enough.
    """
    names = {node.node_id for node in nodes if node.open}
    old = {place: count for place, count in pool.assigned.items() if place[1] != pool.revision and place[0] in names}
    ready = Counter({(crew.node_id, crew.revision): crew.ready for crew in pool.crews})
    blocked = any(crew.blocked for crew in pool.crews if crew.revision == pool.revision)
    # Of the new ones only those count that stay: a node that is being emptied takes its own with it.
    taken_over = sum(min(ready[place], count * pool.slots) for place, count in current.items()) // pool.slots
    each = [
        ((nth + 1) * pool.slots <= ready[place], place[1], count, place[0])
        for place, count in old.items()
        for nth in range(count)
    ]
    parting = any(_is_parting(crew, pool, nodes) for crew in pool.crews)
    lacking = max(workers - taken_over, 0)
    staying = sorted(each, reverse=True)[: max(min(len(each), lacking) - (blocked and not parting), 0)]
    return dict(Counter((node_id, revision) for _, revision, _, node_id in staying))


def _is_parting(crew: Crew, pool: PoolView, nodes: Sequence[NodeView]) -> bool:
    """Whether it holds an old model and was told to leave. Whoever came without an assignment leaves by none."""
    ours = crew.node_id in {node.node_id for node in nodes} and not crew.fetches
    return ours and crew.revision not in (0, pool.revision) and (crew.node_id, crew.revision) not in pool.assigned


def _arrow(pool: PoolView, workers: int) -> PoolArrow | None:
    if pool.state is PoolState.DRAINING and not pool.to_leave:
        return STOP
    if pool.state is PoolState.STARTING and (pool.ready or not workers):
        return WARM
    if pool.state is PoolState.RUNNING and workers and not pool.ready:
        return CHILL
    return None


def _reason(pool: PoolView, workers: int, lacking: int, nodes: Sequence[NodeView], cluster: Cluster) -> str | None:
    """What an operator should know about why the pool is not as it was asked for."""
    if pool.state is PoolState.DRAINING and pool.to_leave:
        return f"{len(pool.to_leave)} workers have not left yet"
    if pool.state not in OPEN:
        return None
    if lacking:
        return _no_node(pool, nodes)
    if too_large := _too_large(pool, cluster):
        return too_large[:REASON_CHARACTERS]
    trouble = sorted({crew.trouble for crew in pool.crews if crew.trouble})
    if trouble:
        return trouble[0][:REASON_CHARACTERS]
    if pool.ready < workers:
        return f"{pool.ready} of {workers} workers are ready"
    return None if workers else ASLEEP if pool.desired else "no workers are wanted"


def _too_large(pool: PoolView, cluster: Cluster) -> str | None:
    """Only of nodes that somebody has to add: those of other providers come with the workers."""
    if pool.provider != "local" or not pool.memory_mb:
        return None
    return too_large_for_all(pool.ask, cluster.gpus())


def _no_node(pool: PoolView, nodes: Sequence[NodeView]) -> str:
    if not any(node.open for node in nodes):
        return "no node runs pools: start `gpuorch worker` somewhere"
    return f"no node has a handler for type {pool.type!r}"
