"""The ledger: the cards of a node, and who uses how much of each, as the stand-in driver tells it.

A card gives no more than it has. What `checker` says about memory is looked at here, at each change.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.leases.history import Grant, History
from tests.gpu.driver import Driver, Line

MEGABYTES = 24_576
GATE_PCT = 90


class SoleDriver(Driver):
    """Edited by this process alone, thousands of times: what the file says is kept here, and only written."""

    def __init__(self, path: Path, library: Path) -> None:
        self._lines: list[Line] = []
        self._editing = threading.RLock()
        super().__init__(path, library)

    def _read(self) -> list[Line]:
        return self._lines

    def _edit(self, change: Callable[[list[Line]], list[Line]]) -> None:
        with self._editing:
            self._lines = change(self._lines)
            self._write(self._lines)


@dataclass
class Use:
    """Memory that a process uses: under a lease, or a stranger's (then since when)."""

    pid: int
    memory_mb: int
    grant: Grant | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass
class Card:
    uuid: str
    total_mb: int = MEGABYTES
    uses: list[Use] = field(default_factory=list)
    #: Leases that are certainly active, and until when they are.
    active: dict[str, tuple[Grant, float]] = field(default_factory=dict)
    lost: bool = False
    #: When the last lease here was asked for, and when the card last came back: leases from before that are void.
    asked: float = 0.0
    reset: float = 0.0
    #: Leases without a process id that are, or were lately, here: when the last of them ended.
    hidden: dict[str, tuple[int, float]] = field(default_factory=dict)
    most_used_mb: int = 0

    @property
    def usable_mb(self) -> int:
        return self.total_mb * GATE_PCT // 100

    @property
    def used_mb(self) -> int:
        return sum(use.memory_mb for use in self.uses)

    def void(self, grant: Grant) -> bool:
        return self.lost or grant.asked < self.reset

    def settled_mb(self, stale_s: float) -> int:
        """Strangers that every sample has seen which could count for the last grant."""
        known_since = self.asked - stale_s
        settled = sum(use.memory_mb for use in self.uses if use.grant is None and use.since < known_since)
        hiding = sum(memory_mb for memory_mb, until in self.hidden.values() if until > known_since - stale_s)
        return max(settled - hiding, 0)

    def overfull(self, stale_s: float) -> str | None:
        strangers_mb = self.settled_mb(stale_s)
        holders_mb = sum(use.memory_mb for use in self.uses if use.grant is not None)
        now = time.monotonic()
        leased_mb = sum(grant.memory_mb for grant, until in self.active.values() if now < until)
        if max(holders_mb, leased_mb) + strangers_mb <= self.usable_mb:
            return None
        sizes = f"{leased_mb} MB leased, {holders_mb} in use under leases, {strangers_mb} of settled strangers"
        return f"{self.uuid}: {sizes}, of {self.usable_mb} usable"


class Node:
    """`stale_s`: how old a sample may be that counts for a grant."""

    def __init__(
        self, node_id: str, driver: SoleDriver, uuids: Sequence[str], history: History, stale_s: float
    ) -> None:
        self.node_id, self.driver = node_id, driver
        self.cards = {uuid: Card(uuid) for uuid in uuids}
        self._history = history
        self._stale_s = stale_s
        self._lock = threading.RLock()
        for place, uuid in enumerate(uuids):
            driver.add_gpu(uuid, MEGABYTES, bus=0x10 + place)

    # --- leases ---

    def granted(self, grant: Grant, *, visible: bool) -> None:
        with self._lock:
            cards = self._of(grant)
            void = any(card.void(grant) for card in cards)  # all or nothing
            for card in cards:
                card.asked = max(card.asked, grant.asked)
                if not void:
                    card.active[grant.token] = (grant, grant.asked + grant.ttl_s)
                if not visible:
                    card.hidden[grant.token] = (grant.memory_mb, float("inf"))
                self._look(card)

    def renewed(self, grant: Grant, sent: float) -> None:
        with self._lock:
            for card in self._of(grant):
                if grant.token in card.active:
                    card.active[grant.token] = (grant, sent + grant.ttl_s)

    def uncertain(self, grant: Grant) -> None:
        """From now on the lease may be over: it is about to be released, will not be renewed, or has lost a card."""
        with self._lock:
            for card in self._of(grant):
                card.active.pop(grant.token, None)
                if grant.token in card.hidden:
                    card.hidden[grant.token] = (grant.memory_mb, time.monotonic())

    # --- memory ---

    def allocate(self, grant: Grant, pid: int, memory_mb: int) -> bool:
        """Look at the cards as a worker does before a start, then take the memory on all of them; False: no room."""
        with self._lock:
            cards = self._of(grant)
            if any(card.void(grant) or card.total_mb - card.used_mb < grant.memory_mb for card in cards):
                return False
            for card in cards:
                card.uses.append(Use(pid, memory_mb, grant))
                self._look(card)
                self._tell(card)
            return True

    def free(self, grant: Grant) -> None:
        self._drop(lambda use: use.grant is grant)

    def died(self, pid: int) -> None:
        self._drop(lambda use: use.pid == pid)

    def intrude(self, uuid: str, pid: int, share: float) -> Use | None:
        """A stranger takes this part of what is left of a card."""
        with self._lock:
            card = self.cards[uuid]
            memory_mb = int((card.total_mb - card.used_mb) * share)
            if card.lost or memory_mb <= 0 or any(use.pid == pid for use in card.uses):
                return None
            card.uses.append(stranger := Use(pid, memory_mb))
            self._tell(card)
            stranger.since = time.monotonic()  # no earlier: a sample could have been taken before the driver knew
            return stranger

    def leave(self, stranger: Use) -> None:
        self._drop(lambda use: use is stranger)

    def _drop(self, gone: Callable[[Use], bool]) -> None:
        with self._lock:
            for card in self.cards.values():
                left = [use for use in card.uses if not gone(use)]
                if len(left) != len(card.uses):
                    card.uses = left
                    self._tell(card)

    # --- faults ---

    def lose(self, uuid: str) -> None:
        with self._lock:
            card = self.cards[uuid]
            card.lost, card.uses = True, []
            for grant, _ in list(card.active.values()):
                self.uncertain(grant)  # on its other cards too
            self._tell(card)
            self.driver.lose(uuid)

    def find(self, uuid: str) -> None:
        """The card is back, empty."""
        with self._lock:
            card = self.cards[uuid]
            card.lost, card.reset = False, time.monotonic()
            self.driver.heal(on=uuid)

    # --- ---

    def _of(self, grant: Grant) -> list[Card]:
        return [self.cards[uuid] for uuid in grant.uuids]

    def _look(self, card: Card) -> None:
        card.most_used_mb = max(card.most_used_mb, card.used_mb)
        overfull = card.overfull(self._stale_s)
        if overfull:
            at_s = time.monotonic() - self._history.began
            self._history.incident("INV-12", f"{overfull} at {at_s:.2f} s")

    def _tell(self, card: Card) -> None:
        held: Counter[int] = Counter()
        for use in card.uses:
            held[use.pid] += use.memory_mb
        self.driver.set_processes(card.uuid, *held.items())


def uuids_of(node: int, count: int) -> list[str]:
    return [f"GPU-{node}{place}" for place in range(count)]
