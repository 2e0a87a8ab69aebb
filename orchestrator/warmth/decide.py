"""One decision: who leaves anyway, who wants more, where there is room, and who makes room."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.placement import Ask, Cluster, Placed, evictions
from orchestrator.warmth import worth
from orchestrator.warmth.staff import Spare, Staff
from orchestrator.warmth.views import Decision, Leave, Pool, Size, Start, State, Terms, Worker

DEFAULT = Terms()
#: Pools for which one decision has others leave. The next one, a moment later, goes on.
MOST_ROOMS = 8


def decide(pools: Iterable[Pool], workers: Iterable[Worker], cluster: Cluster, terms: Terms = DEFAULT) -> Decision:
    """What to do now. The cluster is used up: what starts is taken from it."""
    desk = _Desk(Staff(pools, workers, terms), cluster, terms)
    desk.dismiss()
    desk.grow()
    return desk.decision()


class _Desk:
    """What has been decided so far."""

    def __init__(self, staff: Staff, cluster: Cluster, terms: Terms) -> None:
        self._staff = staff
        self._cluster = cluster
        self._terms = terms
        #: The cluster as it will be when all that leave have left; built when somebody needs it.
        self._later: Cluster | None = None
        #: What was asked for in vain; in a long line most ask for the same.
        self._full: set[Ask] = set()
        self._full_later: set[Ask] = set()
        self._starts: list[Start] = []
        self._leaves: list[Leave] = []
        self._notes: dict[str, str] = {}
        self._rooms = 0
        #: Bids that nobody left for, of pools without a worker.
        self._failed: dict[Ask, list[worth.Bid]] = {}

    def dismiss(self) -> None:
        """Tell those to leave whom nobody wants, whoever else may need their room."""
        for worker, reason in self._staff.unwanted():
            self._leave(worker, None, reason)

    def grow(self) -> None:
        """Give pools what they lack, one after the other."""
        for pool in self._staff.in_line():
            while (why := self._staff.why_more(pool)) and self._one_more(pool, why):
                pass

    def _one_more(self, pool: Pool, why: str) -> bool:
        """Whether it gets one: there is room, it is being made, or others make it now."""
        if _fits(self._cluster, pool.ask, self._full):
            return self._start(pool, why)
        later = self._when_all_left()
        if not _fits(later, pool.ask, self._full_later) and not self._make_room(pool, why, later):
            self._notes[pool.pool_id] = f"{why}; no room, and nobody who would leave for that yet"
            return False
        self._promise(pool, later)
        self._notes[pool.pool_id] = f"{why}; room is being made"
        return True

    def _start(self, pool: Pool, why: str) -> bool:
        placed = self._cluster.place(pool.ask)
        assert isinstance(placed, Placed)
        self._cluster.take(pool.ask, placed)
        if self._later:
            self._later.take(pool.ask, placed)
        self._starts.append(Start(pool.pool_id, placed, why))
        self._staff.expect(pool)
        self._notes[pool.pool_id] = why
        return True

    def _promise(self, pool: Pool, later: Cluster) -> None:
        """Room that will be free is this pool's: the next in line must not count on it."""
        placed = later.place(pool.ask)
        assert isinstance(placed, Placed)
        later.take(pool.ask, placed)
        self._staff.expect(pool)

    def _when_all_left(self) -> Cluster:
        if self._later is None:
            self._later = Cluster(self._cluster.gpus(), [node.host for node in self._cluster.nodes()])
            for worker in self._staff.leaving:
                self._later.free(worker.gpu_uuids, worker.memory_mb)
        return self._later

    def _make_room(self, pool: Pool, why: str, later: Cluster) -> bool:
        """Have others leave for it, if that pays."""
        bid = self._staff.bid(pool)
        if bid.most_s < 0 or self._rooms == MOST_ROOMS or self._hopeless(pool, bid):
            return False
        going = [spare.resident for spare in self._staff.spare() if _goes(spare, pool, bid)]
        victims = evictions(later, pool.ask, going) if going else ()
        for victim in victims:
            self._leave(self._staff.worker(victim.key), pool.pool_id, f"{pool.pool_id} needs the room: {why}")
        self._rooms += bool(victims)
        if not victims and not self._staff.size(pool.pool_id):
            self._failed.setdefault(pool.ask, []).append(bid)
        return bool(victims)

    def _hopeless(self, pool: Pool, bid: worth.Bid) -> bool:
        """Whether one who offered no less for the same has just failed: in a long line most do."""
        return any(bid.offers_no_more_than(failed) for failed in self._failed.get(pool.ask, ()))

    def _leave(self, worker: Worker, room_for: str | None, reason: str) -> None:
        self._staff.dismiss(worker)
        self._leaves.append(Leave(worker.key, worker.pool_id, worker.state is State.IDLE, room_for, reason))
        self._full_later.clear()
        if self._later:
            self._later.free(worker.gpu_uuids, worker.memory_mb)

    def decision(self) -> Decision:
        staff = self._staff
        sizes = {name: Size(staff.size(name), self._notes.get(name) or staff.why_so_many(name)) for name in staff.pools}
        return Decision(sizes, tuple(self._starts), tuple(self._leaves))


def _fits(cluster: Cluster, ask: Ask, in_vain: set[Ask]) -> bool:
    if ask in in_vain:
        return False
    if cluster.fits(ask):
        return True
    in_vain.add(ask)
    return False


def _goes(spare: Spare, taker: Pool, bid: worth.Bid) -> bool:
    """Whether its absence costs less than the taker's waiting; of one that works, whether its own jobs can wait."""
    if spare.pool is taker:
        return False
    return bid.overtakes(spare.pool) if spare.worker.state is State.BUSY else bid.beats(spare.resident.regret)
