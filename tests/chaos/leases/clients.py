"""Clients: each a thread that leases memory of one node for a process, uses it, and leaves in order or not.

There are three sorts. *Sole* clients have a process of their own and end their leases in every way there is. *Twins*
share a process, two and two, so one process holds several leases on a card; *nameless* ones tell no process id, so
nobody can tell their memory from a stranger's. Both free their memory before they release it.
"""

import http.client
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.leases.cards import Node
from tests.chaos.leases.history import Beat, Grant, History

#: MB that clients ask for.
SIZES = (200, 500, 1000, 1500, 2000, 3000, 5000, 9000)
#: Seconds that leases live; those of nameless clients must not expire, since nobody would see their memory stay.
TTL_S, NAMELESS_TTL_S = 4.0, 600.0
#: Seconds for an answer; an orchestrator that takes longer is broken.
TIMEOUT_S = 30.0


class Budget:
    """Operations that are left for all clients together."""

    def __init__(self, operations: int) -> None:
        self._left = operations
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    @property
    def left(self) -> int:
        return max(self._left, 0)


class Process:
    """A real process in whose name memory is used; it only lives."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._child = start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def replace(self) -> None:
        self._child = self._start()


class Server:
    """One thread's connection to an orchestrator."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and answer; asked once, a connection that idled for too long apart."""
        content = json.dumps(body or {})
        for again in (True, False):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
            try:
                self._connection.request("POST", path, content, {"Content-Type": "application/json"})
                answer = self._connection.getresponse()
                return answer.status, json.loads(answer.read())
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.close()
                if not again:
                    raise
        raise AssertionError

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass
class Held:
    """A lease that a client holds, as it sees it."""

    grant: Grant
    pid: int | None
    #: When the last answer that prolonged it was asked for, and when it came.
    renewed: float
    answered: float
    over: bool = False
    #: When its release was sent.
    released: float = float("inf")

    @property
    def in_time(self) -> bool:
        """A fifth before its end it may be over, by the time a question arrives."""
        return time.monotonic() < self.renewed + 0.8 * self.grant.ttl_s

    @property
    def until(self) -> float:
        """The first moment at which the system may take it for ended."""
        return min(self.renewed + self.grant.ttl_s, self.released)


class Client(threading.Thread):
    def __init__(
        self,
        number: int,
        node: Node,
        server: Server,
        history: History,
        budget: Budget,
        rng: random.Random,
        process: Process | None,
        *,
        sole: bool,
        release_s: float,
    ) -> None:
        """`process`: None for a nameless one. `release_s`: how long others are patient with memory that stays."""
        super().__init__(name=f"client-{number}", daemon=True)
        self.number = number
        self._node, self._server, self._history, self._budget, self._rng = node, server, history, budget, rng
        self._process = process
        self._sole = sole
        self._release_s = release_s
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self._budget.left:
                held = self._lease()
                if held is not None:
                    self._hold(held)
        except BaseException as error:  # told by the run
            self.error = error
        finally:
            self._server.close()

    # --- one lease ---

    def _lease(self) -> Held | None:
        self._budget.take()
        rng = self._rng
        ttl_s = TTL_S if self._process else NAMELESS_TTL_S
        memory_mb, count = rng.choice(SIZES), 2 if rng.random() < 0.1 else 1
        body = {
            "agent": f"client-{self.number}",
            "min_memory_mb": memory_mb,
            "ttl_seconds": ttl_s,
            "gpu_count": count,
            "node_id": self._node.node_id,
        }
        pid = self._process.pid if self._process else None
        asked = time.monotonic()
        status, answer = self._server.post("/leases", body if pid is None else body | {"pid": pid})
        if status != 200:
            raise RuntimeError(f"POST /leases: {status} {answer}")
        if not answer["granted"]:
            self._history.count(f"denied: {answer['code']}")
            time.sleep(rng.uniform(0.02, 0.3))
            return None
        gpus = answer.get("gpus") or [answer]
        uuids = tuple(gpu["gpu_uuid"] for gpu in gpus)
        grant = Grant(answer["token"], self.number, uuids, memory_mb, ttl_s, asked, time.monotonic())
        self._history.grants.append(grant)
        self._history.count("granted")
        self._node.granted(grant, visible=pid is not None)
        return Held(grant, pid, asked, grant.answered)

    def _hold(self, held: Held) -> None:
        rng = self._rng
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0.0, 0.5))
            self._renew(held)
        # Mostly all of it: only full cards show that memory was given twice.
        memory_mb = held.grant.memory_mb
        used_mb = memory_mb if rng.random() < 0.8 else rng.randint(memory_mb // 2, memory_mb)
        fits = held.in_time and not held.over and self._node.allocate(held.grant, held.pid or self._stand_in(), used_mb)
        if not fits:
            self._history.count("no room before the start")
        pause_s = 0.25 if rng.random() < 0.9 else 2.5
        for _ in range(rng.randrange(6) if fits else 0):
            time.sleep(rng.uniform(0.0, pause_s))
            self._renew(held)
            if held.over or not self._budget.left:
                break
        self._leave(held)

    def _stand_in(self) -> int:
        """In whose name a nameless client uses memory: of a process that nobody was told of."""
        return 4_000_000 + self.number

    def _renew(self, held: Held) -> None:
        self._budget.take()
        in_time, sent = held.in_time, time.monotonic()
        status, answer = self._server.post(f"/leases/{held.grant.token}/heartbeat")
        answered = time.monotonic()
        why = str(answer.get("detail", ""))
        self._history.beats.append(Beat(held.grant, sent, answered, status, in_time and held.in_time, why))
        if status == 200:
            held.renewed, held.answered = sent, answered
            self._node.renewed(held.grant, sent)
            self._history.count("renewed")
        else:
            self._node.uncertain(held.grant)
            held.over = True
            self._history.count(f"renewal refused: {status}")

    def _release(self, held: Held) -> None:
        self._budget.take()
        self._node.uncertain(held.grant)
        held.released = time.monotonic()
        status, answer = self._server.post(f"/leases/{held.grant.token}/release")
        if status != 200:
            self._history.incident("INV-14", f"release of {held.grant.name}: {status} {answer}")
        self._history.count("released")

    def _free(self, held: Held) -> None:
        self._node.free(held.grant)
        if time.monotonic() - held.until > self._release_s:  # on purpose, or since this machine is busy
            self._history.kept.add(held.grant.name)

    # --- ways to leave ---

    def _leave(self, held: Held) -> None:
        ways = (self._in_order, self._late, self._crash, self._hang, self._keep)
        way = self._in_order
        if self._sole and not held.over and self._budget.left:
            (way,) = self._rng.choices(ways, (70, 22, 4, 3, 0.3))
        self._history.count(f"left: {way.__name__.removeprefix('_')}")
        way(held)

    def _in_order(self, held: Held) -> None:
        self._free(held)
        self._release(held)

    def _late(self, held: Held) -> None:
        self._release(held)
        time.sleep(self._rng.uniform(0.0, self._release_s / 4))
        self._free(held)

    def _keep(self, held: Held) -> None:
        self._release(held)
        time.sleep(self._release_s + self._rng.uniform(1.0, 3.0))
        self._free(held)

    def _crash(self, held: Held) -> None:
        """The process dies with its memory; nobody renews."""
        assert self._process is not None
        self._node.uncertain(held.grant)
        self._process.kill()
        self._node.died(self._process.pid)
        self._process.replace()
        self._expect_end(held)

    def _hang(self, held: Held) -> None:
        """Nothing is renewed, and the memory stays until the client finds out."""
        self._node.uncertain(held.grant)
        time.sleep(TTL_S)
        self._expect_end(held)
        self._free(held)

    def _expect_end(self, held: Held) -> None:
        """An expired lease cannot be renewed, and stays so."""
        time.sleep(max(held.answered + held.grant.ttl_s + 0.1 - time.monotonic(), 0.0))
        self._renew(held)
        if not held.over:
            self._history.incident("INV-17", f"{held.grant.name} was renewed after it had expired")
