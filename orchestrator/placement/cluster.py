"""Choosing among nodes, one request after the other.

A cluster is built from a snapshot, answers a batch, and is thrown away; or it lives on and is told what was taken.
Scores are kept per shape of request until their node changes, so a decision looks only at the nodes that changed
since that shape was asked last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from orchestrator.placement.mix import Mix
from orchestrator.placement.node import Node, dominant
from orchestrator.placement.policies import Choice, Policy, Scale, choose
from orchestrator.placement.views import SHOWN, Ask, GpuView, HostView, Reason

#: GPUs a refusal names as evidence.
MOST_EVIDENCE = 16

NO_MIX = Mix()

#: How `_why_not` begins, for a job's lease.
_REFUSED_MB = re.compile(r"needs (\d{1,10}) MB(?: on each of \d+ GPUs of one node)?; ")


@dataclass(frozen=True, slots=True)
class Placed:
    """One node, and as many of its GPUs as were asked for (none, if none were)."""

    node_id: str
    gpus: tuple[GpuView, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a GPU says to a request that was refused. `code` is None for one that would have fitted alone."""

    gpu: GpuView
    code: Reason | None
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    #: What stands against it on most nodes.
    code: Reason
    #: For people, with numbers.
    reason: str
    evidence: tuple[Evidence, ...] = ()

    @property
    def gpus(self) -> tuple[GpuView, ...]:
        """Those that the evidence is about."""
        return tuple(one.gpu for one in self.evidence)


class Cluster:
    def __init__(self, gpus: Iterable[GpuView], hosts: Iterable[HostView] = ()) -> None:
        known = {host.node_id: host for host in hosts}
        by_node: defaultdict[str, list[GpuView]] = defaultdict(list)
        for gpu in gpus:
            by_node[gpu.node_id].append(gpu)
        # Sorted: the same GPUs lead to the same decisions, in whatever order the database names them.
        node_ids = sorted(by_node.keys() | known.keys())
        self._nodes = [Node(name, by_node[name], known.get(name) or HostView(name)) for name in node_ids]
        self._position = {node.node_id: position for position, node in enumerate(self._nodes)}
        self._scale = _scale_of(self._nodes)
        self._reserved_for = {gpu.reserved_for for gpu in self.gpus()}
        self._gpu_count = sum(len(node.gpus) for node in self._nodes)
        self._changed: list[int] = []
        self._mix = NO_MIX
        self._rankings: dict[tuple[Ask, Policy], _Ranking] = {}

    def gpus(self, node_id: str | None = None) -> Iterator[GpuView]:
        """The GPUs as they are after everything that was taken."""
        for node in self.nodes(node_id):
            yield from node.gpus

    def nodes(self, node_id: str | None = None) -> Sequence[Node]:
        if node_id is None:
            return self._nodes
        return [self._nodes[self._position[node_id]]] if node_id in self._position else []

    def place(self, ask: Ask, policy: Policy = Policy.BEST_FIT, mix: Mix = NO_MIX) -> Placed | Refused:
        """Choose `gpu_count` GPUs of one node, all or nothing, or say why not."""
        if ask.node_id is not None:
            return self._best_of(self.nodes(ask.node_id), ask, policy, mix) or self._refuse(ask, None)
        warm = [self._nodes[self._position[name]] for name in sorted(ask.warm_nodes) if name in self._position]
        if warm and (placed := self._best_of(warm, ask, policy, mix)):
            return placed
        ranking = self._ranking(ask, policy, mix)
        return ranking.best() or self._refuse(ask, ranking)

    def fits(self, ask: Ask) -> bool:
        """Whether `place` would find room."""
        return any(node.fits(ask) for node in self.nodes(ask.node_id))

    def take(self, ask: Ask, placed: Placed) -> None:
        """Later asks see that `placed` is given away."""
        position = self._position[placed.node_id]
        self._nodes[position].take(ask, placed.gpus)
        self._changed.append(position)

    def free(self, gpu_uuids: Collection[str], memory_mb: int, node_id: str | None = None) -> None:
        """Later asks see so much more room on each of these GPUs: what they hold is about to leave.

        Whoever knows their node says so: looking for them costs as much as there are GPUs.
        """
        for node in self.nodes(node_id):
            if any(gpu.gpu_uuid in gpu_uuids for gpu in node.gpus):
                node.free(gpu_uuids, memory_mb)
                self._changed.append(self._position[node.node_id])

    def _best_of(self, nodes: Sequence[Node], ask: Ask, policy: Policy, mix: Mix) -> Placed | None:
        choices = [(choose(node, ask, policy, mix, self._scale), node) for node in nodes]
        fitting = [(choice, node) for choice, node in choices if choice is not None]
        return _placed(*min(fitting, key=lambda found: found[0].score)) if fitting else None

    def _ranking(self, ask: Ask, policy: Policy, mix: Mix) -> _Ranking:
        if policy is Policy.FRAGMENTATION and mix is not self._mix:
            self._mix = mix
            self._rankings.clear()
        shape = self._shape(ask)
        ranking = self._rankings.get((shape, policy))
        if ranking is None:
            ranking = self._rankings[shape, policy] = _Ranking(self._nodes, shape, policy, mix, self._scale)
        ranking.catch_up(self._changed)
        return ranking

    def _shape(self, ask: Ask) -> Ask:
        """The ask without what makes no difference: who asks (unless something is reserved for it), what is warm."""
        key = ask.key if ask.key in self._reserved_for else ""
        return ask._replace(key=key, warm_nodes=frozenset()) if ask.key != key or ask.warm_nodes else ask

    def _refuse(self, ask: Ask, ranking: _Ranking | None) -> Refused:
        nodes = self.nodes(ask.node_id)
        if not nodes or (ask.gpu_count and not any(node.gpus for node in nodes)):
            return Refused(Reason.NO_GPU, f"needs {_wanted(ask)}; no GPU is known on {_name_of(ask.node_id)}")
        evidence = tuple(islice(_evidence(nodes, ask), MOST_EVIDENCE))
        reasons = ranking.reasons if ranking else [node.why_not(ask) for node in nodes]
        gpu_count = self._gpu_count if ask.node_id is None else len(nodes[0].gpus)
        return Refused(dominant(reasons), _why_not(ask, evidence, gpu_count), evidence)


class _Ranking:
    """The nodes for one shape of request, best first."""

    def __init__(self, nodes: Sequence[Node], ask: Ask, policy: Policy, mix: Mix, scale: Scale) -> None:
        self._nodes = nodes
        self._ask, self._policy, self._mix, self._scale = ask, policy, mix, scale
        # Score, position, version of the node. Entries of nodes that have changed since stay until they are on top:
        # finding them would cost more.
        self._heap: list[tuple[float, int, int]] = []
        #: What was chosen on each node; None where it does not fit, and why not.
        self._choices: list[Choice | None] = [None] * len(nodes)
        self.reasons: list[Reason | None] = [None] * len(nodes)
        self._seen: int | None = None

    def catch_up(self, changed: Sequence[int]) -> None:
        """Look again at the nodes that changed since the last time; the first time at all."""
        if self._seen is None:
            self._look_at_all()
        else:
            for position in set(changed[self._seen :]):
                node = self._nodes[position]
                self._note(position, node, choose(node, self._ask, self._policy, self._mix, self._scale))
        self._seen = len(changed)

    def _look_at_all(self) -> None:
        """Nodes that look the same get the same answer: a cluster of a thousand has a few dozen different ones."""
        known: dict[object, Choice | None] = {}
        for position, node in enumerate(self._nodes):
            looks = node.looks()
            if looks not in known:
                known[looks] = choose(node, self._ask, self._policy, self._mix, self._scale)
            self._note(position, node, known[looks])

    def _note(self, position: int, node: Node, choice: Choice | None) -> None:
        self._choices[position] = choice
        if choice is None:
            self.reasons[position] = node.why_not(self._ask)
        else:
            self.reasons[position] = None
            heappush(self._heap, (choice.score, position, node.version))

    def best(self) -> Placed | None:
        while self._heap:
            _, position, version = self._heap[0]
            node, choice = self._nodes[position], self._choices[position]
            if choice is not None and node.version == version:
                return _placed(choice, node)
            heappop(self._heap)
        return None


def _scale_of(nodes: Sequence[Node]) -> Scale:
    return Scale(
        gpu_mb=max([1, *(gpu.usable_mb for node in nodes for gpu in node.gpus)]),
        node_mb=max([1, *(sum(gpu.usable_mb for gpu in node.gpus) for node in nodes)]),
        cpu_milli=max([1, *(node.host.cpu_milli_free or 0 for node in nodes)]),
    )


def _placed(choice: Choice, node: Node) -> Placed:
    return Placed(node.node_id, tuple([node.gpus[room.position] for room in choice.rooms]))


def _evidence(nodes: Sequence[Node], ask: Ask) -> Iterator[Evidence]:
    for node in nodes:
        for gpu in node.gpus:
            yield Evidence(gpu, *(node.refusal(gpu, ask) or (None, "fits")))


def _name_of(node_id: str | None) -> str:
    return f"node {node_id}" if node_id else "the cluster"


def _why_not(ask: Ask, evidence: Sequence[Evidence], gpu_count: int) -> str:
    shown = [f"{one.gpu.node_id}/{one.gpu.gpu_index}: {one.text}" for one in evidence[:SHOWN]]
    more = f" and {gpu_count - SHOWN} more" if gpu_count > SHOWN else ""
    return f"needs {_wanted(ask)}; {', '.join(shown) or 'no host has that'}{more}"


def refused_mb(reason: str) -> int | None:
    """The memory on each GPU that was refused with this reason; None: it says nothing of memory."""
    found = _REFUSED_MB.match(reason)
    return int(found[1]) if found else None


def _wanted(ask: Ask) -> str:
    wanted = f"{ask.memory_mb} MB"
    if ask.gpu_count == 0:
        wanted = "no GPU"
    elif ask.gpu_count > 1:
        wanted += f" on each of {ask.gpu_count} GPUs of one node"
    if ask.models:
        wanted += f" of {' or '.join(sorted(ask.models))}"
    if ask.cpu_milli:
        wanted += f", {ask.cpu_milli} CPU milli"
    if ask.host_memory_mb:
        wanted += f", {ask.host_memory_mb} MB of the host"
    return wanted
