"""A session: one registration under one worker id, and everything that works under it.

It ends in order (SIGTERM: finish or hand back, deregister) or because the leader declared the worker dead; then
everything it ran is killed, since it runs elsewhere already.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time

from orchestrator import __version__
from orchestrator.errors import Unavailable
from orchestrator.identity import instance_id
from orchestrator.store import nodes
from orchestrator.store.nodes import Worker
from worker import host
from worker.node import Node
from worker.parts import Parts
from worker.post import Post

log = logging.getLogger(__name__)

#: Seconds between looks whether a drain is over.
LOOK_EVERY_S = 0.2
#: Why jobs are ended whose worker the leader gave up.
DECLARED_DEAD = "its worker was declared dead"


class Session:
    """One registration: begins, takes jobs, and ends in order. What works under its id are its `Parts`."""

    def __init__(self, node: Node, post: Post) -> None:
        self._node = node
        self._post = post
        self._db = node.db
        self.worker_id = instance_id()
        self._registered = False
        self._leave_by = math.inf
        self.over = threading.Event()
        self.lost = False
        self._parts = parts = Parts(node, post, self.worker_id, self._on_lost)
        self._lane, self._slots, self._intake, self._preloader = parts.lane, parts.slots, parts.intake, parts.preloader

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self._slots.memory)

    def begin(self) -> None:
        """Start the slots, register once their handlers are known, then load the pool's model and take jobs."""
        self._slots.start()
        while not self._slots.wait_known(1.0) and not self.over.is_set():
            pass
        if self.over.is_set():
            return  # told to leave before anybody knew of it
        self._node.handlers_load = True
        worker = self._describe()
        self._db.write(lambda conn: nodes.register(conn, worker, host.describe(self._node.gpus.name)))
        self._registered = True
        self._node.keepalive.join(self._parts.pulse)
        if self._preloader is not None:
            self._preloader.start()
        self._intake.start()
        largest = max(self._slots.batching.sizes.values(), default=0)
        self._node.publisher.reaches(self._lane.name, self._slots.count * largest)
        self._node.publisher.nudge(self._lane.name)
        for why in sorted(self._slots.silent):
            log.warning("module without handlers", extra={"reason": why})
        about = {"worker_id": self.worker_id, "pool_id": self._lane.name}
        log.info("worker ready", extra={**about, "job_types": ", ".join(sorted(self.types))})

    def _describe(self) -> Worker:
        return Worker(
            self.worker_id,
            self._node.node_id,
            self._lane.name,
            socket.gethostname(),
            os.getpid(),
            self._slots.count,
            self.types,
            __version__,
            self._post.revision,
        )

    @property
    def usable(self) -> bool:
        return self._slots.usable() > 0

    @property
    def load(self) -> tuple[int, int]:
        return self._slots.busy(), self._slots.count

    @property
    def blocked(self) -> bool:
        """Whether it waits for GPU memory."""
        return self._preloader is not None and self._preloader.blocked

    def resize(self, slots: int) -> None:
        if slots == self._slots.count:
            return
        self._slots.resize(slots)
        self._node.keepalive.poke()

    def leave(self, grace_s: float) -> None:
        """Take no more jobs, from now on; `end` waits until then for those that run. Said again, it counts anew."""
        self._leave_by = time.monotonic() + grace_s
        self._parts.take_no_more()
        self.over.set()

    def end(self) -> None:
        """Stop reading → finish or hand back → write it down → deregister. Heartbeats go on until the last."""
        left_s = max(self._leave_by - time.monotonic(), 0.0)
        self.leave(left_s if self._parts.draining else self._node.settings.worker_grace_s)
        self._node.keepalive.poke()
        self._finish_or_hand_back()
        self._intake.join()
        self._finish_or_hand_back()  # a claim that was being committed comes after the rest
        self._parts.close()
        if not self._registered:
            return
        try:
            worker = self._describe()
            self._db.write(lambda conn: nodes.deregister(conn, worker))
            self._node.publisher.publish(self._lane.name)
            self._lane.forget_consumer(self.worker_id)
        except Unavailable as away:
            extra = {"worker_id": self.worker_id, "pool_id": self._lane.name, "error": str(away)}
            log.warning("left without a word", extra=extra)  # the leader notices the silence

    def _finish_or_hand_back(self) -> None:
        """In steps: whoever drains may lose patience meanwhile, or be declared dead and its jobs run elsewhere.

        Slots that run nothing go as soon as no claim is under way: their memory need not wait for the longest job.
        """
        while not self._slots.wait_idle(min(max(self._leave_by - time.monotonic(), 0.0), LOOK_EVERY_S)):
            if self.lost:
                self._slots.hand_back(DECLARED_DEAD)
                return
            if time.monotonic() >= self._leave_by:
                self._slots.hand_back("its worker was stopped")
                return
            if self._intake.is_alive:
                self._intake.interrupt()
            else:
                self._slots.resize(0)

    def abandon(self) -> None:
        """Kill what runs and leave: the leader gave our jobs away, or they never were ours."""
        self._intake.stop()
        self._slots.hand_back(DECLARED_DEAD)
        self._parts.close()

    def _on_lost(self) -> None:
        self.lost = True
        self.over.set()
