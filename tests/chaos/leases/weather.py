"""What happens to the cards: strangers come and go, cards and drivers fail, an operator clears quarantines."""

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from sqlalchemy import func, select, text

from orchestrator.store import gpus as store_gpus
from orchestrator.store import schema
from orchestrator.store.database import Database
from tests.chaos.leases.cards import Node, Use
from tests.chaos.leases.clients import Process
from tests.chaos.leases.history import History, Outage, Quarantine

#: Seconds within which the database must know of a fault, and leases of a lost card be revoked: samples come every
#: half second, but this machine may be busy.
NOTICED_S = 60.0
#: Weight of each fault, and what the database makes of it.
FAULTS = {
    "lost": (4, "lost"),
    "ecc": (2, "unhealthy"),
    "memory": (2, "unknown"),
    "hang": (1, "unknown"),
    "reload": (1, "unknown"),
}
#: One statement, so one snapshot: the account of each GPU beside the leases it stands for.
ACCOUNTS = text(
    "SELECT g.gpu_uuid, g.usable_mb, g.leased_mb, COALESCE(SUM(IF(l.state = 'active', s.memory_mb, 0)), 0)"
    " FROM gpus g LEFT JOIN lease_gpus s ON s.gpu_uuid = g.gpu_uuid"
    " LEFT JOIN orchestrator_leases l ON l.token = s.token GROUP BY g.gpu_uuid, g.usable_mb, g.leased_mb"
)


class Repeated(threading.Thread):
    """Calls `step` until stopped; an exception ends it and is kept."""

    def __init__(self, name: str, step: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._step = step
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._step()
        except BaseException as error:  # told by the run
            self.error = error


class Strangers:
    """Processes that nobody knows take parts of what is left of a card, and leave."""

    def __init__(self, node: Node, processes: Sequence[Process], history: History, rng: random.Random) -> None:
        self._node, self._processes, self._history, self._rng = node, processes, history, rng
        self._here: list[tuple[float, Use]] = []
        self.thread = Repeated(f"strangers-{node.node_id}", self._step)

    def _step(self) -> None:
        rng, now = self._rng, time.monotonic()
        for _, use in [one for one in self._here if one[0] < now]:
            self._node.leave(use)
        self._here = [one for one in self._here if one[0] >= now]
        uuid, process = rng.choice(list(self._node.cards)), rng.choice(self._processes)
        came = self._node.intrude(uuid, process.pid, rng.uniform(0.1, 0.7))
        if came is not None:
            self._history.count("strangers")
            self._here.append((now + rng.choice((0.5, 3.0, 8.0)) * rng.uniform(0.5, 1.5), came))
        self.thread.stopping.wait(rng.uniform(0.2, 1.5))

    def leave(self) -> None:
        for _, use in self._here:
            self._node.leave(use)


class Faults:
    """One fault of a node after the other."""

    def __init__(self, node: Node, db: Database, history: History, rng: random.Random, calm_s: float) -> None:
        self._node, self._db, self._history, self._rng, self._calm_s = node, db, history, rng, calm_s
        self.thread = Repeated(f"faults-{node.node_id}", self._step)

    def _step(self) -> None:
        if self.thread.stopping.wait(self._rng.uniform(0.2, 1.0) * self._calm_s):
            return
        (name,) = self._rng.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])
        uuids = tuple(self._node.cards) if name in {"hang", "reload"} else (self._rng.choice(list(self._node.cards)),)
        outage = Outage(name, uuids, time.monotonic())
        self._history.outages.append(outage)
        self._history.count(f"fault: {name}")
        self._break(name, uuids[0])
        if _within(NOTICED_S, lambda: self._health(uuids) == {FAULTS[name][1]}):
            outage.seen = time.monotonic()
        if name == "lost" and outage.seen and _within(NOTICED_S, lambda: self._active(uuids) == 0):
            outage.revoked = time.monotonic()
        time.sleep(self._rng.uniform(0.2, 2.0))
        outage.mended = time.monotonic()
        self._mend(name, uuids[0])
        # What the database still says of this fault must not pass for the next one, noticed at once.
        _within(NOTICED_S, lambda: self._health(uuids) == {"ok"})

    def _break(self, name: str, uuid: str) -> None:
        driver = self._node.driver
        match name:
            case "lost":
                self._node.lose(uuid)
            case "ecc":
                driver.change(uuid, ecc=3)
            case "memory":
                driver.fail("memory", 999, uuid)
            case "hang":
                driver.hang("memory")
            case "reload":
                driver.unload()

    def _mend(self, name: str, uuid: str) -> None:
        driver = self._node.driver
        match name:
            case "lost":
                self._node.find(uuid)
            case "ecc":
                driver.change(uuid, ecc=0)
            case "memory":
                driver.heal(on=uuid)
            case _:
                driver.heal(on="all")

    def _health(self, uuids: Collection[str]) -> set[str]:
        query = select(schema.gpus.c.health).where(schema.gpus.c.gpu_uuid.in_(uuids))
        return set(self._db.read(lambda conn: conn.execute(query).scalars().all()))

    def _active(self, uuids: Collection[str]) -> int:
        leases, shares = schema.leases, schema.lease_gpus
        query = (
            select(func.count())
            .select_from(leases.join(shares, shares.c.token == leases.c.token))
            .where(shares.c.gpu_uuid.in_(uuids), leases.c.state == "active")
        )
        return int(self._db.read(lambda conn: conn.execute(query).scalar_one()))


class Operator:
    """Looks at the accounts all the time, and clears cards in quarantine after a while."""

    def __init__(self, db: Database, history: History, rng: random.Random) -> None:
        self._db, self._history, self._rng = db, history, rng
        self.looks = 0
        self.thread = Repeated("operator", self._step)

    def _step(self) -> None:
        self.look()
        self.clear()
        self.thread.stopping.wait(0.1)

    def look(self) -> list[Any]:
        accounts = list(self._db.read(lambda conn: conn.execute(ACCOUNTS).all()))
        self.looks += 1
        for uuid, usable_mb, leased_mb, shares_mb in accounts:
            if leased_mb > usable_mb:
                self._history.incident("INV-12", f"{uuid}: {leased_mb} MB leased of {usable_mb} usable")
            if leased_mb != shares_mb:
                self._history.incident("INV-12", f"{uuid}: {leased_mb} MB leased, its leases say {shares_mb}")
        return accounts

    def clear(self) -> None:
        query = select(schema.gpus.c.gpu_uuid, schema.gpus.c.quarantine_reason).where(
            schema.gpus.c.quarantined_at.is_not(None)
        )
        for uuid, reason in self._db.read(lambda conn: conn.execute(query).all()):
            self._history.quarantines.append(Quarantine(uuid, reason, time.monotonic()))
            self._history.count("quarantines")
            self.thread.stopping.wait(self._rng.uniform(0.0, 0.5))
            self._db.write(partial(store_gpus.clear, uuid=uuid))


def _within(seconds: float, fact: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
