"""A session: one registration under one worker id, and everything that works under it.

It ends in order (SIGTERM: finish or hand back, deregister) or because the leader declared the worker dead; then
everything it ran is killed, since it runs elsewhere already.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from orchestrator import __version__, batch_sizes
from orchestrator.batch_sizes import BatchSizes, Sizes
from orchestrator.errors import Overloaded, Unavailable
from orchestrator.gpu import Gpu, Health
from orchestrator.identity import instance_id
from orchestrator.jobs import BURY, FAIL, FINISH, HAND_BACK, RETRY, SKIP, RetryPolicy
from orchestrator.leases import ResidentSlot, Terms
from orchestrator.store import nodes
from orchestrator.store.claim import NO_BLANK_SLOT, Claim, NotClaimed
from orchestrator.store.inventory import Findings
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import Beat, Worker
from orchestrator.store.settle import End, Release, Settled, Start, never_started
from orchestrator.telemetry import life, logs, tracing
from orchestrator.telemetry.life import about
from worker import host
from worker.custody import Custody, Departure
from worker.held import Held
from worker.intake import Intake
from worker.keepalive import Pulse
from worker.ledger import Ledger
from worker.lifeline import Lifeline
from worker.node import Node
from worker.post import Post
from worker.preload import Preloader
from worker.questions import Questions
from worker.run import Batch, Run
from worker.slots import SlotEvents, SlotPool
from worker.spawner import Spawner

log = logging.getLogger(__name__)

#: Seconds between looks whether a drain is over.
LOOK_EVERY_S = 0.2


class Session:
    """One registration: creates everything that works under its worker id, and ends it in order."""

    def __init__(self, node: Node, post: Post) -> None:
        self._node = node
        self._settings = settings = node.settings
        self._post = post
        self._db = node.db
        self._publisher = node.publisher
        self._lane = node.hub.lane(post.pool_id)
        self.worker_id = instance_id()
        self._by = Claimant(
            self.worker_id, node.node_id, self._lane.name, settings.job_lease_ttl_s, Terms.of(settings), post.model_id
        )
        self._held = Held()
        self._progress: dict[str, tuple[int, float, str]] = {}
        self._counts = {"done": 0, "failed": 0}
        self._batch_sizes: BatchSizes = {}
        self._draining = False
        self._closed = False
        self._leave_by = math.inf
        self._load_s: float | None = None
        self._lifeline = Lifeline()
        self.over = threading.Event()
        self.lost = False
        #: Its part in the node's heartbeats, once it is registered.
        self._pulse: Pulse | None = None
        with logs.bind(worker_id=self.worker_id, pool_id=self._lane.name):
            self._create()

    def _create(self) -> None:
        """Everything that works under this id; the threads of it tell it in their lines."""
        node, settings = self._node, self._settings
        # Apart from the slots' thread, which must never wait for the database.
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="questions", initializer=logs.inherited())
        self._questions = Questions(node.db, settings, self.worker_id, self._lane.name)
        self._spawner = Spawner(node.db, settings, node.policies, self._publisher.nudge)
        self._slots = self._new_slots()
        self._preloader = self._new_preloader()
        self._custody = Custody(node.gpus, self._slots, self._write_down)
        self._ledger = self._new_ledger()
        self._intake = self._new_intake()

    def _new_slots(self) -> SlotPool:
        settings = self._settings
        return SlotPool(
            self._post.slots,
            self.worker_id,
            [str(settings.payload_max_bytes), self._pool_json(), *settings.worker_handlers],
            self._node.gpus.environment(),
            SlotEvents(
                self._started,
                self._ended,
                self._left,
                self._progressed,
                self._asked,
                self._put_back,
                self._unloaded,
                self._loaded,
                self._load_failed,
                self._died,
                self._spanned,
            ),
            settings.cancel_step_s,
            self._lifeline,
            self._post.model,
            starts=self._node.starts,
            nursery=self._node.nursery,
        )

    def _new_preloader(self) -> Preloader | None:
        model = self._post.model
        return model and Preloader(self._db, self._by, model, self._node.gpus, self._slots, self._write_down)

    def _new_ledger(self) -> Ledger:
        return Ledger(
            self._db,
            self._lane,
            self._by,
            RetryPolicy.of(self._settings),
            self._node.acknowledger,
            self._node.policies,
            memory_for=self._memory_for,
            size_of=self._slots.size_of,
            held=self._held.job_ids,
            claim_is_near=lambda: self._intake.backlogged and self._slots.quick,
            on_settled=self._settled,
            on_freed=self._freed,
            on_stuck=self._on_lost,
        )

    def _new_intake(self) -> Intake:
        hub = self._node.hub
        return Intake(
            self._db,
            hub,
            self._lane,
            hub.reader(self._lane, self.worker_id),
            self._slots,
            self._ledger,
            self._held,
            self._settings,
            vouched=lambda: self._lifeline.vouched,
            no_room=self._custody.no_room,
            on_read=self._read,
            on_refused=self._refused,
            on_denied=self._denied,
            on_claimed=self._claimed,
        )

    def _memory_for(self, type: str) -> int | None:
        """Need of a job that does not say: what its pool says of its model, else what the handler declares."""
        model = self._post.model
        if model is not None and model.type == type and model.memory_mb is not None and type in self._slots.memory:
            return model.memory_mb
        return self._slots.memory_for(type)

    def _pool_json(self) -> str:
        told: dict[str, Any] = {"adapter": self._post.adapter, "variant": self._post.variant}
        if self._settings.otlp_endpoint:
            told["tracing"] = {"worker_id": self.worker_id, "pool_id": self._lane.name}
        return json.dumps(told)

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
        worker = self._describe()
        self._db.write(lambda conn: nodes.register(conn, worker, host.describe(self._node.gpus.name)))
        self._pulse = Pulse(
            self.worker_id,
            self._beat,
            self._slots.marks,
            self._lifeline,
            self._on_lost,
            self._cancelled,
            self._sampled,
        )
        self._node.keepalive.join(self._pulse)
        if self._preloader is not None:
            self._preloader.start()
        self._intake.start()
        largest = max(self._slots.batching.sizes.values(), default=0)
        self._publisher.reaches(self._lane.name, self._settings.worker_slots * largest)
        self._publisher.nudge(self._lane.name)
        log.info("worker ready", extra={"worker_id": self.worker_id, "pool_id": self._lane.name})

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
        self._draining = True
        self._intake.stop()
        self.over.set()

    def end(self) -> None:
        """Stop reading → finish or hand back → write it down → deregister. Heartbeats go on until the last."""
        self.leave(max(self._leave_by - time.monotonic(), 0.0) if self._draining else self._settings.worker_grace_s)
        self._node.keepalive.poke()
        self._finish_or_hand_back()
        self._intake.join()
        self._finish_or_hand_back()  # a claim that was being committed comes after the rest
        self._close()
        if self._pulse is None:
            return  # it never registered
        try:
            worker = self._describe()
            self._db.write(lambda conn: nodes.deregister(conn, worker))
            self._publisher.publish(self._lane.name)
            self._lane.forget_consumer(self.worker_id)
        except Unavailable as away:
            extra = {"worker_id": self.worker_id, "pool_id": self._lane.name, "error": str(away)}
            log.warning("left without a word", extra=extra)  # the leader notices the silence

    def _finish_or_hand_back(self) -> None:
        """In steps: whoever drains may lose patience meanwhile.

        Slots that run nothing go as soon as no claim is under way: their memory need not wait for the longest job.
        """
        while not self._slots.wait_idle(min(max(self._leave_by - time.monotonic(), 0.0), LOOK_EVERY_S)):
            if time.monotonic() >= self._leave_by:
                self._slots.hand_back("its worker was stopped")
                return
            if not self._intake.is_alive:
                self._slots.resize(0)

    def abandon(self) -> None:
        """Kill what runs and leave: the leader gave our jobs away, or they never were ours."""
        self._intake.stop()
        self._slots.hand_back("its worker was declared dead")
        self._close()

    def _close(self) -> None:
        """Once: what is closed here, others may have opened since under the same number."""
        if self._closed:
            return
        self._closed = True
        if self._preloader is not None:
            self._preloader.close()
        self._slots.close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._intake.join()
        self._custody.close(self._settings.db_timeout_s)
        self._ledger.close(self._settings.db_timeout_s)
        self._spawner.close()
        if self._pulse is not None:
            self._node.keepalive.leave(self._pulse)
        self._lifeline.close()  # last: a heartbeat writes to it

    # ── what the parts tell ─────────────────────────────────────────────────────────────────────────────────

    def _started(self, claim: Claim) -> None:
        self._ledger.note(Start(claim.job_id, claim.attempt), self._held.entry_of(claim.job_id))

    def _ended(self, batch: Batch, ends: Sequence[End], slot: str, keeps: bool) -> None:
        claim = batch[0]
        if claim.batch:
            self._batch_sizes.setdefault(claim.type, Sizes()).count(len(batch))
        if claim.lease is None or not claim.gpus:
            for end in ends:
                self._write_down(end)
            return
        pinned = claim.type in self._slots.pinned
        self._custody.after(Departure(slot, claim.lease.key, claim.gpus, claim, tuple(ends), keeps, pinned))

    def _died(self, run: Run, ends: Sequence[End]) -> None:
        if spans := tracing.spans():
            spans.died(ends, time.monotonic() - run.since, self.worker_id, self._lane.name, run.lead.type)

    def _spanned(self, packed: str) -> None:
        if spans := tracing.spans():
            spans.carried(packed)

    def _claimed(self, claims: Sequence[Claim], since: int, until: int) -> None:
        if spans := tracing.spans():
            spans.claimed(claims, since, until, self.worker_id, self._lane.name)

    def _unloaded(self, mark: str) -> None:
        assert self._preloader is not None, "only slots of a pool with a model ask for it"
        self._preloader.add(mark)

    def _load_failed(self, error: str) -> None:
        if self._preloader is not None:
            self._preloader.failed(error)

    def _loaded(self, model: ResidentSlot | None, seconds: float) -> None:
        self._load_s = seconds if self._load_s is None else (self._load_s + seconds) / 2
        if self._preloader is not None:
            self._preloader.loaded(model)
        self._node.keepalive.poke()  # the leader waits for it

    def _left(self, model: ResidentSlot, slot: str) -> None:
        self._custody.after(Departure(slot, model.key, model.gpus))

    def _write_down(self, event: End | Release) -> None:
        if isinstance(event, Release):
            self._ledger.note(event)
            return
        self._progress.pop(event.job_id, None)
        self._ledger.note(event, self._held.entry_of(event.job_id))

    def _refused(self, claim: Claim, no_room: str | None) -> None:
        """Claimed, but its slot went away meanwhile, or the memory that its lease speaks of is not there."""
        reason, pause = (no_room, self._settings.gpu_sample_s) if no_room else ("no slot was free any more", 0.0)
        back = never_started(claim.job_id, claim.attempt, reason, claim.lease_key, pause)
        back = back._replace(trace_context=claim.trace_context)
        if no_room:
            self._node.keepalive.poke()  # the database must hear of it before others get the same answer
        try:
            self._write_down(back)
        except Overloaded:  # the session ended while the claim was being committed: the leader finds the job
            log.warning("left a claimed job behind", extra=about(claim))

    def _put_back(self, batch: Batch) -> None:
        for claim in batch:
            self._refused(claim, None)

    def _denied(self, answers: Sequence[NotClaimed]) -> None:
        if any(answer.put_back for answer in answers):
            self._publisher.nudge(self._lane.name)
        if any(answer.reason == NO_BLANK_SLOT for answer in answers):
            self._slots.make_blank(self._settings.resident_min_s)
        elif any(answer.evicting for answer in answers):
            self._node.keepalive.poke()  # it hears which of our warm models must leave

    def _sampled(self, sample: list[Gpu], findings: Findings) -> None:
        self._slots.evict(findings.evicted)
        self._slots.evict(findings.forgotten, self._settings.db_timeout_s)  # a younger one may not be written down yet
        self._slots.lose_gpus({gpu.uuid for gpu in sample if gpu.health is Health.LOST})
        self._custody.end_strays(sample, self.worker_id)

    def _progressed(self, claim: Claim, fraction: float, note: str) -> None:
        """What a handler says must not be able to stop the heartbeat that carries it."""
        if math.isfinite(fraction):
            text = str(note).encode(errors="replace").decode()
            self._progress[claim.job_id] = (claim.attempt, min(max(float(fraction), 0.0), 1.0), text)

    def _asked(self, claim: Claim, head: dict[str, Any], body: str) -> None:
        self._asking.submit(self._answer, claim, head, body)

    def _answer(self, claim: Claim, head: dict[str, Any], body: str) -> None:
        self._slots.answer(claim, *self._questions.answer(claim, head, body))

    def _cancelled(self, jobs: Sequence[tuple[str, int]]) -> None:
        for job_id, attempt in jobs:
            self._slots.cancel(job_id, attempt)

    def _read(self, count: int, ran_dry: bool) -> None:
        if not count:
            self._publisher.idle(self._lane.name)
        elif ran_dry:
            self._publisher.nudge(self._lane.name)
        else:
            self._publisher.consumed(self._lane.name, count)

    def _settled(self, settled: Sequence[Settled]) -> None:
        self._held.drop([item.end.job_id for item in settled])
        life.settled(settled)
        self._counts["done"] += sum(item.arrow in (FINISH, SKIP) for item in settled)
        self._counts["failed"] += sum(item.arrow in (FAIL, BURY, RETRY) for item in settled)
        for item in settled:
            if item.end.spawned and item.arrow is FINISH:
                self._spawner.add(item.end.job_id, item.end.attempt)
        if any(item.arrow in (HAND_BACK, RETRY) for item in settled):
            self._publisher.nudge(self._lane.name)

    def _freed(self, lanes: Collection[str]) -> None:
        for lane in lanes:
            self._publisher.nudge(lane)

    def _beat(self) -> Beat:
        progress = tuple((job_id, *report) for job_id, report in list(self._progress.items()))
        held = tuple(self._held.job_ids())
        return Beat(
            self._slots.busy(),
            self._counts["done"],
            self._counts["failed"],
            self._draining,
            progress,
            held,
            self._slots.resident(),
            self._slots.count,
            self._slots.usable(),
            self._trouble(),
            self.blocked,
            self._load_s,
            batch_sizes.to_text(self._batch_sizes),
        )

    def _trouble(self) -> str | None:
        return (self._preloader and self._preloader.trouble) or self._slots.trouble

    def _on_lost(self) -> None:
        self.lost = True
        self.over.set()
