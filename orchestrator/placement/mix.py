"""What is usually asked: shapes of recent requests with their shares, and what free memory is worth to them.

3 GB left on a GPU are worth something only to those who ask for 3 GB or less. What is useless depends on what people
ask for, so we remember that: `RecentAsks` counts, `Mix` answers.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from orchestrator.placement.views import Ask

#: Asks below which a mix would be an accident; until then there is none.
FEWEST_ASKS = 10
#: Shapes a mix keeps, the most usual ones: memory sizes may be anything, and each shape costs time.
MOST_SHAPES = 200
#: Answers and kinds of hosts that a mix remembers: it may live for days.
MOST_ANSWERS = 100_000
MOST_HOSTS = 5000
#: Share of the recent asks that must differ from the mix before it is built anew: a new one makes all scores void.
DRIFT = 0.2


class Shape(NamedTuple):
    """The part of a request that repeats: its size, not who asks nor where."""

    memory_mb: int
    gpu_count: int = 1
    models: frozenset[str] = frozenset()
    cpu_milli: int = 0
    host_memory_mb: int = 0

    @classmethod
    def of(cls, ask: Ask) -> Shape:
        return cls(ask.memory_mb, ask.gpu_count, ask.models, ask.cpu_milli, ask.host_memory_mb)


class Takers:
    """Those of a mix that a host can serve: what free memory on its GPUs is worth to them."""

    def __init__(
        self, shares: Iterable[tuple[Shape, float]], answers: dict[tuple[Takers, tuple[int, ...]], float]
    ) -> None:
        singles: defaultdict[int, float] = defaultdict(float)
        gangs: defaultdict[tuple[int, int], float] = defaultdict(float)
        for shape, share in shares:
            if shape.gpu_count == 1:
                singles[shape.memory_mb] += share
            elif shape.gpu_count > 1:
                gangs[shape.memory_mb, shape.gpu_count] += share
        self._needs = sorted(singles)
        self._served = [0.0]
        for need in self._needs:
            self._served.append(self._served[-1] + singles[need])
        #: Those who ask for several GPUs at once: memory on each, how many, share.
        self.gangs = tuple((memory_mb, count, share) for (memory_mb, count), share in gangs.items())
        self._answers = answers

    def worth(self, free_mb: int) -> float:
        """Of so much free memory on one GPU, the part that is usable, in the mean over those who ask for one GPU."""
        return free_mb * self._served[bisect_right(self._needs, free_mb)]

    def loss(self, free_mb: int, need_mb: int) -> float:
        """What is lost of that when so much is taken."""
        served, needs, left_mb = self._served, self._needs, free_mb - need_mb
        return free_mb * served[bisect_right(needs, free_mb)] - left_mb * served[bisect_right(needs, left_mb)]

    def worth_of(self, frees: tuple[int, ...]) -> float:
        """The same for the GPUs of a node, and for those too who ask for several of them at once."""
        known = self._answers.get((self, frees))
        if known is None:
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            known = self._answers[self, frees] = sum(map(self.worth, frees)) + self._worth_to_gangs(frees)
        return known

    def _worth_to_gangs(self, frees: Sequence[int]) -> float:
        """Nothing, unless there are enough of them."""
        total = 0.0
        for memory_mb, count, share in self.gangs:
            large = [free for free in frees if free >= memory_mb]
            if len(large) >= count:
                total += share * sum(large)
        return total


class Mix:
    """Shapes with their shares of all requests; they add up to 1. An empty mix knows nothing and is false."""

    def __init__(self, weights: Mapping[Shape, float] | None = None) -> None:
        usual = sorted((weights or {}).items(), key=lambda item: (-item[1], repr(item[0])))[:MOST_SHAPES]
        total = sum(weight for _, weight in usual)
        self.shares = {shape: weight / total for shape, weight in usual if weight > 0}
        # A host with 5000 or 5900 CPU milli left serves the same shapes when none asks for something in between.
        self._cpu_steps = sorted({shape.cpu_milli for shape in self.shares})
        self._memory_steps = sorted({shape.host_memory_mb for shape in self.shares})
        self._takers: dict[tuple[str, int, int], Takers] = {}
        self._answers: dict[tuple[Takers, tuple[int, ...]], float] = {}
        gpu_mb = sum(share * shape.memory_mb * shape.gpu_count for shape, share in self.shares.items())
        cpu_milli = sum(share * shape.cpu_milli for shape, share in self.shares.items())
        host_mb = sum(share * shape.host_memory_mb for shape, share in self.shares.items())
        #: MB of GPU memory that go with one CPU milli, and with one MB of the host, in the mean.
        self._gpu_mb_per_cpu_milli = gpu_mb / cpu_milli if cpu_milli else inf
        self._gpu_mb_per_host_mb = gpu_mb / host_mb if host_mb else inf

    def __bool__(self) -> bool:
        return bool(self.shares)

    def takers(self, model: str, cpu_milli: float, memory_mb: float) -> Takers:
        """Those that a host with GPUs of this model and so much left can serve."""
        key = model, bisect_right(self._cpu_steps, cpu_milli), bisect_right(self._memory_steps, memory_mb)
        known = self._takers.get(key)
        if known is None:
            if len(self._takers) >= MOST_HOSTS:
                self._takers.clear()
                self._answers.clear()
            known = self._takers[key] = Takers(self._served_by(model, cpu_milli, memory_mb), self._answers)
        return known

    def _served_by(self, model: str, cpu_milli: float, memory_mb: float) -> Iterator[tuple[Shape, float]]:
        for shape, share in self.shares.items():
            host_fits = shape.cpu_milli <= cpu_milli and shape.host_memory_mb <= memory_mb
            if host_fits and (not shape.models or model in shape.models):
                yield shape, share

    def servable_mb(self, cpu_milli: float, memory_mb: float) -> float:
        """How much GPU memory a host with so much left serves before it runs out, at the usual ratio."""
        return min(_served(cpu_milli, self._gpu_mb_per_cpu_milli), _served(memory_mb, self._gpu_mb_per_host_mb))

    def drift(self, counts: Mapping[Shape, int], total: int) -> float:
        """The share of these asks that the mix would have to change to look like them: 0 the same, 1 all others."""
        shapes = self.shares.keys() | counts.keys()
        return sum(abs(self.shares.get(shape, 0.0) - counts.get(shape, 0) / total) for shape in shapes) / 2


def _served(left: float, gpu_mb_each: float) -> float:
    """Without end where the host does not report what it has, or where nobody asks for it."""
    return inf if inf in (left, gpu_mb_each) else max(left, 0) * gpu_mb_each


class RecentAsks:
    """The last `size` asks, and the mix they make. Any thread may add."""

    def __init__(self, size: int = 1000) -> None:
        self._lock = threading.Lock()
        self._recent: deque[Shape] = deque(maxlen=size)
        self._counts: Counter[Shape] = Counter()
        self._mix = Mix()
        self._unseen = 0

    def add(self, *asks: Ask) -> None:
        shapes = [Shape.of(ask) for ask in asks]
        with self._lock:
            for shape in shapes:
                if len(self._recent) == self._recent.maxlen:
                    self._drop(self._recent[0])
                self._recent.append(shape)
                self._counts[shape] += 1
            self._unseen += len(shapes)

    def _drop(self, shape: Shape) -> None:
        self._counts[shape] -= 1
        if not self._counts[shape]:
            del self._counts[shape]

    def mix(self) -> Mix:
        """The mix of the recent asks: the same object until they differ from it by enough."""
        with self._lock:
            total = len(self._recent)
            # Looked at only when an eighth is new: comparing costs, and a few asks change nothing.
            if total >= FEWEST_ASKS and self._unseen * 8 >= total:
                self._unseen = 0
                if self._mix.drift(self._counts, total) > DRIFT:
                    self._mix = Mix(self._counts)
            return self._mix
