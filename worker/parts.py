"""The parts of a session: what works under one worker id, who creates whom, and what they tell each other."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from orchestrator.errors import Overloaded
from orchestrator.gpu import Gpu, Health
from orchestrator.jobs import FINISH, HAND_BACK, RETRY, ErrorKind, RetryPolicy
from orchestrator.leases import ResidentSlot, Terms
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.claim_leases import NO_BLANK_SLOT
from orchestrator.store.inventory import Findings
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import Beat
from orchestrator.store.settle import End, Outcome, Release, Settled, Start, never_started
from orchestrator.telemetry import life, logs, tracing
from orchestrator.telemetry.life import about
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
from worker.standing import Standing

log = logging.getLogger(__name__)


class Parts:
    """`on_lost` hears that the leader gave this worker's jobs away, or that it cannot write down what it did."""

    def __init__(self, node: Node, post: Post, worker_id: str, on_lost: Callable[[], None]) -> None:
        self._node = node
        self._settings = settings = node.settings
        self._post = post
        self._db = node.db
        self._publisher = node.publisher
        self.lane = node.hub.lane(post.pool_id)
        self._worker_id = worker_id
        self._on_lost = on_lost
        self._by = Claimant(
            worker_id, node.node_id, self.lane.name, settings.job_lease_ttl_s, Terms.of(settings), post.model_id
        )
        self._held = Held()
        self._standing = Standing()
        #: Whether the worker takes no more jobs, as its heartbeats say.
        self.draining = False
        self._closed = False
        with logs.bind(worker_id=worker_id, pool_id=self.lane.name), ExitStack() as undoing:
            self._create(undoing)
            undoing.pop_all()

    def _create(self, undoing: ExitStack) -> None:
        """Everything that works under this id; the threads of it tell it in their lines.

        When one cannot be had, `undoing` ends those that are there: whoever mans the post tries again and again.
        """
        node, settings = self._node, self._settings
        self._lifeline = Lifeline()
        undoing.callback(self._lifeline.close)
        # Apart from the slots' thread, which must never wait for the database.
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="questions", initializer=logs.inherited())
        self._questions = Questions(node.db, settings, self._worker_id, self.lane.name)
        self._spawner = Spawner(node.db, settings, node.policies, self._publisher.nudge)
        self.slots = self._new_slots()
        undoing.callback(self.slots.close)
        self.preloader = self._new_preloader()
        self._custody = Custody(node.gpus, self.slots, self._write_down)
        undoing.callback(self._custody.close, settings.db_timeout_s)
        self._ledger = self._new_ledger()
        undoing.callback(self._ledger.close, settings.db_timeout_s)
        self.intake = self._new_intake()
        self.pulse = self._new_pulse()

    def _new_slots(self) -> SlotPool:
        settings = self._settings
        return SlotPool(
            self._post.slots,
            self._worker_id,
            [str(settings.payload_max_bytes), self._pool_json(), *settings.worker_handlers],
            self._node.gpus.environment(),
            SlotEvents(
                started=self._started,
                ended=self._ended,
                left=self._left,
                progressed=self._standing.progressed,
                asked=self._asked,
                put_back=self._put_back,
                unloaded=self._unloaded,
                loaded=self._loaded,
                load_failed=self._load_failed,
                died=self._died,
                missed=self._missed,
                spanned=self._spanned,
            ),
            settings.cancel_step_s,
            self._lifeline,
            self._post.model,
            starts=self._node.starts,
            nursery=self._node.nursery,
        )

    def _new_preloader(self) -> Preloader | None:
        model = self._post.model
        return model and Preloader(self._db, self._by, model, self._node.gpus, self.slots, self._write_down)

    def _new_ledger(self) -> Ledger:
        return Ledger(
            self._db,
            self.lane,
            self._by,
            RetryPolicy.of(self._settings),
            self._node.acknowledger,
            self._node.policies,
            memory_for=self._memory_for,
            size_of=self.slots.size_of,
            held=self._held.job_ids,
            claim_is_near=lambda: self.intake.backlogged and self.slots.quick,
            on_settled=self._settled,
            on_freed=self._freed,
            on_stuck=self._on_lost,
        )

    def _new_intake(self) -> Intake:
        hub = self._node.hub
        return Intake(
            self._db,
            hub,
            self.lane,
            hub.reader(self.lane, self._worker_id),
            self.slots,
            self._ledger,
            self._held,
            self._settings,
            vouched=lambda: self._lifeline.vouched,
            no_room=self._custody.no_room,
            on_read=self._read,
            on_refused=self._refused,
            on_broken=self._broken,
            on_denied=self._denied,
            on_claimed=self._claimed,
        )

    def _new_pulse(self) -> Pulse:
        return Pulse(
            self._worker_id,
            self._beat,
            running=self.slots.marks,
            lifeline=self._lifeline,
            on_lost=self._on_lost,
            on_cancelled=self._cancelled,
            on_sampled=self._sampled,
        )

    def _memory_for(self, type: str) -> int | None:
        """Need of a job that does not say: what its pool says of its model, else what the handler declares."""
        model = self._post.model
        if model is not None and model.type == type and model.memory_mb is not None and type in self.slots.memory:
            return model.memory_mb
        return self.slots.memory_for(type)

    def _pool_json(self) -> str:
        told: dict[str, Any] = {"adapter": self._post.adapter, "variant": self._post.variant}
        if self._settings.otlp_endpoint:
            told["tracing"] = {"worker_id": self._worker_id, "pool_id": self.lane.name}
        return json.dumps(told)

    def take_no_more(self) -> None:
        """From now on no jobs are read; heartbeats say so."""
        self.draining = True
        self.intake.stop()

    def close(self) -> None:
        """Once: what is closed here, others may have opened since under the same number."""
        if self._closed:
            return
        self._closed = True
        if self.preloader is not None:
            self.preloader.close()
        self.slots.close()
        self._asking.shutdown(wait=False, cancel_futures=True)
        self.intake.join()
        self._custody.close(self._settings.db_timeout_s)
        self._ledger.close(self._settings.db_timeout_s)
        self._spawner.close()
        self._node.keepalive.leave(self.pulse)
        self._lifeline.close()  # last: a heartbeat writes to it

    # ── what the parts tell ─────────────────────────────────────────────────────────────────────────────────

    def _started(self, claim: Claim) -> None:
        self._ledger.note(Start(claim.job_id, claim.attempt), self._held.entry_of(claim.job_id))

    def _ended(self, batch: Batch, ends: Sequence[End], slot: str, keeps: bool) -> None:
        claim = batch[0]
        self._standing.ran(batch)
        if claim.lease is None or not claim.gpus:
            for end in ends:
                self._write_down(end)
            return
        pinned = claim.type in self.slots.pinned
        self._custody.after(Departure(slot, claim.lease.key, claim.gpus, claim, tuple(ends), keeps, pinned))

    def _died(self, run: Run, ends: Sequence[End]) -> None:
        if spans := tracing.spans():
            spans.died(ends, time.monotonic() - run.since, self._worker_id, self.lane.name, run.lead.type)

    def _missed(self, why: str) -> None:
        """Where a slot found all of them before, somebody may bring it back; else the next would miss it, too."""
        if not self._node.handlers_load:
            self._node.give_up(why)

    def _spanned(self, packed: str) -> None:
        if spans := tracing.spans():
            spans.carried(packed)

    def _claimed(self, claims: Sequence[Claim], since: int, until: int) -> None:
        if spans := tracing.spans():
            spans.claimed(claims, since, until, self._worker_id, self.lane.name)

    def _unloaded(self, mark: str) -> None:
        assert self.preloader is not None, "only slots of a pool with a model ask for it"
        self.preloader.add(mark)

    def _load_failed(self, error: str) -> None:
        if self.preloader is not None:
            self.preloader.failed(error)

    def _loaded(self, model: ResidentSlot | None, seconds: float) -> None:
        self._standing.loaded(seconds)
        if self.preloader is not None:
            self.preloader.loaded(model)
        self._node.keepalive.poke()  # the leader waits for it

    def _left(self, model: ResidentSlot, slot: str) -> None:
        self._custody.after(Departure(slot, model.key, model.gpus))

    def _write_down(self, event: End | Release) -> None:
        if isinstance(event, Release):
            self._ledger.note(event)
            return
        self._standing.ended(event.job_id)
        self._ledger.note(event, self._held.entry_of(event.job_id))

    def _refused(self, claim: Claim, no_room: str | None) -> None:
        """Claimed, but its slot went away meanwhile, or the memory that its lease speaks of is not there."""
        reason, pause = (no_room, self._settings.gpu_sample_s) if no_room else ("no slot was free any more", 0.0)
        if no_room:
            self._node.keepalive.poke()  # the database must hear of it before others get the same answer
        self._end_unstarted(claim, never_started(claim.job_id, claim.attempt, reason, claim.lease_key, pause))

    def _broken(self, claim: Claim, error: str) -> None:
        """Claimed, and nothing can be made of it here. It is charged: handed back, it would come again for ever."""
        end = never_started(claim.job_id, claim.attempt, error, claim.lease_key)
        self._end_unstarted(claim, end._replace(outcome=Outcome.FAILED, error_kind=ErrorKind.TRANSIENT))

    def _end_unstarted(self, claim: Claim, end: End) -> None:
        try:
            self._write_down(end._replace(trace_context=claim.trace_context))
        except Overloaded:  # the session ended while the claim was being committed: the leader finds the job
            log.warning("left a claimed job behind", extra=about(claim))

    def _put_back(self, batch: Batch) -> None:
        for claim in batch:
            self._refused(claim, None)

    def _denied(self, answers: Sequence[NotClaimed]) -> None:
        if any(answer.put_back for answer in answers):
            self._publisher.nudge(self.lane.name)
        if any(answer.reason == NO_BLANK_SLOT for answer in answers):
            self.slots.make_blank(self._settings.resident_min_s)
        elif any(answer.evicting for answer in answers):
            self._node.keepalive.poke()  # it hears which of our warm models must leave

    def _sampled(self, sample: list[Gpu], findings: Findings) -> None:
        self.slots.evict(findings.evicted)
        self.slots.evict(findings.forgotten, self._settings.db_timeout_s)  # a younger one may not be written down yet
        self.slots.lose_gpus({gpu.uuid for gpu in sample if gpu.health is Health.LOST})
        self._custody.end_strays(sample, self._worker_id)

    def _asked(self, claim: Claim, head: dict[str, Any], body: str) -> None:
        self._asking.submit(self._answer, claim, head, body)

    def _answer(self, claim: Claim, head: dict[str, Any], body: str) -> None:
        self.slots.answer(claim, *self._questions.answer(claim, head, body))

    def _cancelled(self, jobs: Sequence[tuple[str, int]]) -> None:
        for job_id, attempt in jobs:
            self.slots.cancel(job_id, attempt)

    def _read(self, count: int, ran_dry: bool) -> None:
        if not count:
            self._publisher.idle(self.lane.name)
        elif ran_dry:
            self._publisher.nudge(self.lane.name)
        else:
            self._publisher.consumed(self.lane.name, count)

    def _settled(self, settled: Sequence[Settled]) -> None:
        self._held.drop([item.end.job_id for item in settled])
        life.settled(settled)
        self._standing.settled(settled)
        for item in settled:
            if item.end.spawned and item.arrow is FINISH:
                self._spawner.add(item.end.job_id, item.end.attempt)
        if any(item.arrow in (HAND_BACK, RETRY) for item in settled):
            self._publisher.nudge(self.lane.name)

    def _freed(self, lanes: Collection[str]) -> None:
        for lane in lanes:
            self._publisher.nudge(lane)

    def _beat(self) -> Beat:
        held = self._held.job_ids()
        return self._standing.beat(
            self.slots, self.preloader, held, intake_trouble=self.intake.trouble, draining=self.draining
        )
