"""The process that `gpuorch worker` is: it compares what this node should run with what it runs, and mends that.

Level-triggered: it reads what should be from the database (its own lane, and the share of the pools that the leader
assigned to this node), on a timer and whenever the doorbell rings. What it missed it sees the next time. Only one
process of a node runs pools; started for one pool (`--pool`), it serves that one and follows what its row says.

SIGTERM and SIGINT: it leaves, and running jobs get `worker_grace_s`. SIGUSR1, which `gpuorch drain-worker` sends: it
takes no more jobs and leaves when the last has ended, however long that takes; the node's pools are another's at once.
A SIGTERM then means what it always does.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.errors import ConfigError, OrchestratorError, Unavailable
from orchestrator.identity import WORKER_PROCESS, instance_id
from orchestrator.jobs import DEFAULT_LANE
from orchestrator.settings import Settings
from orchestrator.store import crews
from orchestrator.store.crews import Order
from worker.node import Node
from worker.post import Post
from worker.price import PriceTag
from worker.service import Service
from worker.session import Session

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

#: Seconds until a post that could not be manned is tried again; each time twice as many.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
#: Seconds that jobs get of a worker that drains by itself: whoever wants it gone sooner says so.
UNHURRIED_S = 31_536_000.0


class Duty(NamedTuple):
    """A post that should be manned; with `leave_s`, it should be left, its jobs may end within so many seconds."""

    post: Post
    leave_s: float | None = None
    #: Only those who serve it already know what it is.
    outdated: bool = False


class _Pause(NamedTuple):
    """Before a post that could not be manned is tried again."""

    until: float
    length_s: float


class Supervisor:
    """Runs posts until stopped; survives servers that are away."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._id = instance_id()
        self._stop = threading.Event()
        #: Until when jobs may run, once it is told to stop.
        self._leave_by = math.inf
        self._drain = threading.Event()
        self._wake = threading.Event()
        #: Why it will never run anything.
        self._hopeless: str | None = None
        self._node = Node(settings, self._wake.set, self._give_up)
        self._node_id = self._node.node_id
        self._db = self._node.db
        self._services: dict[tuple[str, int], Service] = {}
        #: Those whose last jobs run. Their posts may be manned again beside them: a long job keeps nobody waiting.
        self._leaving: list[Service] = []
        #: Posts that could not be manned, or broke before their slots were up.
        self._pauses: dict[tuple[str, int], _Pause] = {}
        #: What should run, by the last answer of the database.
        self._duties = [Duty(self._own_post())]
        #: Seconds in which somebody wants this node empty.
        self._node_leave_s: float | None = None
        self._has_node = False
        #: Whether the pool that it was started for has ever had a row.
        self._had_pool = False
        self._tag = PriceTag(settings, self._load) if settings.pod_name else None

    def stop(self) -> None:
        self._leave_by = min(self._leave_by, time.monotonic() + self._settings.worker_grace_s)
        self._stop.set()
        self._wake.set()

    def see_it_leave(self) -> None:
        """Once it is told to stop, tell all posts, and end the process if it is still there after its limit.

        In a thread of its own: whoever reads orders may wait for the database just then. The one limit of it all: each
        step may wait for a server that does not answer, or for a slot that does not end, and together they would take
        minutes. What could not be written by then, the leader finds.
        """
        self._stop.wait()
        self._tell_all_to_leave()
        time.sleep(self._settings.leave_limit_s)
        posts = sum(not service.over.is_set() for service in self._present())
        log.error("left without waiting longer", extra={"posts": posts})
        os._exit(1)  # threads that wait for a server cannot be ended, and some would be waited for

    def drain(self) -> None:
        """Take no more jobs, and leave when the last has ended."""
        self._drain.set()
        self._wake.set()

    def _give_up(self, why: str) -> None:
        self._hopeless = why
        self.stop()

    def run(self) -> None:
        """Until all posts are left. Raises ConfigError, after that, if a module of handlers is not there."""
        self._node.start()
        if self._tag is not None:
            self._tag.start()
        while not self._stop.is_set():
            self._look()
            self._converge()
            if self._drain.is_set() and not self._present():
                break
            self._wake.wait(self._settings.reconcile_interval_s)
            self._wake.clear()
        self._leave()
        if self._tag is not None:
            self._tag.close()
        self._node.close()
        if self._hopeless is not None:
            raise ConfigError(self._hopeless)

    # ── what should be ──────────────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        """Without an answer, what should be is what should have been."""
        try:
            if self._drain.is_set():
                self._give_up_node()
            # It says that this node runs its pools, too.
            self._duties, leave_s = self._node.heart.write(self._read)
            if leave_s is not None and self._node_leave_s is None:
                log.warning("node is drained", extra={"reason": _idle_until_resumed(self._node_id)})
            self._node_leave_s = leave_s
        except Unavailable as away:
            log.warning("orders unknown", extra={"error": str(away)})
        except Exception:
            log.exception("orders unreadable")  # the node must not lose its jobs to a bug in reading orders

    def _read(self, conn: Connection) -> tuple[list[Duty], float | None]:
        lane = self._settings.worker_pool
        if lane:
            duties = self._own(conn, lane)
        elif self._drain.is_set():
            duties = self._left(conn)
        else:
            duties = [Duty(self._own_post()), *self._assigned(conn)]
        return duties, crews.node_leave_s(conn, self._node_id)

    def _own_post(self) -> Post:
        return Post(self._settings.worker_pool or DEFAULT_LANE, self._settings.worker_slots)

    def _own(self, conn: Connection, pool_id: str) -> list[Duty]:
        """What the pool's row says; without one, whoever was started for this lane serves it.

        Unless there was one: a pool that is deleted was closed, and its lane does not open to those who left it.
        """
        order = crews.order_for(conn, pool_id)
        if order is None:
            return [] if self._had_pool else [Duty(self._own_post())]
        self._had_pool = True
        return [Duty(Post.of(order, self._settings.worker_slots), order.leave_s)]

    def _assigned(self, conn: Connection) -> list[Duty]:
        types = self._types()
        timeout_s = self._settings.worker_timeout_s
        # Before its handlers are known nobody can tell whether a pool may run here.
        if not types or not crews.take_node(conn, self._node_id, self._id, types, timeout_s):
            return []
        self._has_node = True
        return [_duty(order) for order in crews.orders(conn, self._node_id)]

    def _left(self, conn: Connection) -> list[Duty]:
        """Of one that drains: the posts that it has, which somebody may want left sooner. It gets no new ones."""
        posts = [service.post for service in self._present()]
        orders = {pool_id: crews.order_for(conn, pool_id) for pool_id in {post.pool_id for post in posts}}
        return [Duty(post, order.leave_s) for post in posts if (order := orders[post.pool_id]) is not None]

    def _types(self) -> tuple[str, ...]:
        return next((service.types for service in self._present() if service.types), ())

    def _present(self) -> list[Service]:
        return [*self._services.values(), *self._leaving]

    # ── what is ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _converge(self) -> None:
        wanted = {duty.post.key: duty for duty in self._duties}
        present = self._present()
        for service in present:
            self._note_health(service)
        self._pauses = {key: pause for key, pause in self._pauses.items() if key in wanted}
        present = [service for service in present if not service.over.is_set()]
        self._services = {service.post.key: service for service in present if not service.leaving}
        self._leaving = [service for service in present if service.leaving]
        for key, duty in wanted.items() if self._leave_s is None else ():
            if key not in self._services and duty.leave_s is None and not duty.outdated and duty.post.slots:
                self._man(duty.post)
        for service in self._present():
            try:
                self._adjust(service, wanted.get(service.post.key))
            except Exception:
                log.exception("post not told its orders", extra={"pool_id": service.post.pool_id})

    def _man(self, post: Post) -> None:
        """One that cannot be manned (no more threads, no more files) must not cost the others their jobs."""
        pause = self._pauses.get(post.key)
        if pause is not None and time.monotonic() < pause.until:
            return
        try:
            service = Service(post, self._new_session)
            service.start()
        except Exception:
            log.exception("post not manned", extra={"pool_id": post.pool_id})
            self._pause(post.key)
        else:
            self._services[post.key] = service

    def _note_health(self, service: Service) -> None:
        if service.types:
            self._pauses.pop(service.post.key, None)
        if service.over.is_set() and not service.leaving:  # it broke
            self._pause(service.post.key)

    def _pause(self, key: tuple[str, int]) -> None:
        last = self._pauses.get(key)
        length_s = FIRST_PAUSE_S if last is None else min(2 * last.length_s, LONGEST_PAUSE_S)
        self._pauses[key] = _Pause(time.monotonic() + length_s, length_s)

    def _adjust(self, service: Service, duty: Duty | None) -> None:
        limits = [limit for limit in (self._leave_s, duty and duty.leave_s) if limit is not None]
        if limits:
            service.leave(min(limits))
        elif duty is not None and not service.leaving:
            service.resize(duty.post.slots)
        elif not service.leaving and not self._fills_in(service):  # nobody wants it any more, nobody is in a hurry
            service.leave(self._settings.pool_drain_s)

    @property
    def _leave_s(self) -> float | None:
        """Seconds in which all posts should be left."""
        if self._node_leave_s is None and self._drain.is_set():
            return UNHURRIED_S
        return self._node_leave_s

    def _load(self) -> tuple[int, int]:
        loads = [service.load for service in self._present()]
        return sum(busy for busy, _ in loads), sum(slots for _, slots in loads)

    def _fills_in(self, service: Service) -> bool:
        """Whether it serves its pool while the one that follows it is not warm yet."""
        pool_id, revision = service.post.key
        return any(
            other.post.pool_id == pool_id and other.post.revision > revision and not other.warm
            for other in self._services.values()
        )

    def _new_session(self, post: Post) -> Session:
        return Session(self._node, post)

    def _leave(self) -> None:
        self._tell_all_to_leave()
        for service in self._present():
            service.join()
        try:
            self._give_up_node()
        except Unavailable as away:
            log.warning("left without a word", extra={"error": str(away)})

    def _tell_all_to_leave(self) -> None:
        """All posts at once: each has its own jobs to wait for."""
        for service in self._present():
            service.leave(max(self._leave_by - time.monotonic(), 0.0))

    def _give_up_node(self) -> None:
        """Its pools run elsewhere from now on, or by another process of this node. Raises Unavailable."""
        if self._has_node:
            self._db.write(lambda conn: crews.leave_node(conn, self._node_id, self._id))
            self._has_node = False
            self._node.hub.ask_for_pools(self._node_id)


def _idle_until_resumed(node_id: str) -> str:
    return f"no jobs are taken: gpuorch nodes resume {node_id}"


def _duty(order: Order) -> Duty:
    return Duty(Post.of(order, order.workers * order.slots), order.leave_s, order.outdated)


def run(settings: Settings) -> int:
    """Run a worker until a signal ends it; the process's exit code. Raises ConfigError."""
    # Thousands of short-lived objects a second and no cycles among them: let the collector look less often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    supervisor = Supervisor(settings)

    def stop(_number: int, _frame: object) -> None:
        supervisor.stop()

    def drain(_number: int, _frame: object) -> None:
        supervisor.drain()

    signal.signal(signal.SIGUSR1, drain)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=supervisor.see_it_leave, name="leaving", daemon=True).start()
    # After that: whoever sees the name may signal.
    Path("/proc/self/comm").write_text(WORKER_PROCESS)
    try:
        supervisor.run()
    except ConfigError:
        raise  # the command line tells it like all that it refuses
    except OrchestratorError as error:
        log.error("worker failed", extra={"error": str(error)})  # noqa: TRY400
        return 1
    return 0
