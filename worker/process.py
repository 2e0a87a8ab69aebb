"""One slot's process, as its supervisor sees it: started, given a job, asked to stop, killed."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from orchestrator.leases import GpuShare, ResidentSlot
from orchestrator.store.claim import Claim
from orchestrator.telemetry.life import about
from worker import wire
from worker.flags import Flags
from worker.lifeline import Lifeline
from worker.nursery import Child, Nursery
from worker.run import NEVER, Batch, Run

log = logging.getLogger(__name__)

#: Seconds in which a slot must take what it is sent.
SEND_TIMEOUT_S = 5
#: Seconds after which it is dead that began to say something and does not go on.
STUCK_S = 2.0


@dataclass
class SlotProcess:
    """`run` is what it runs; it is free when it said hello and runs nothing."""

    process: Child
    pipe: wire.Channel
    flags: Flags
    #: WORKER_ID#NUMBER: what its processes are recognised by, also after its end.
    mark: str = ""
    born: float = field(default_factory=time.monotonic)
    #: It has not said hello yet; and why it will not, if it says so.
    starting: bool = True
    unfit: str | None = None
    unfit_trace: str | None = None
    ready: bool = False
    dying: bool = False
    #: It waits for what it is to load, or loads it.
    unloaded: bool = False
    loading: bool = False
    #: When it began to start, or to load; and what to tell of that when it takes long.
    began: float = field(default_factory=time.monotonic)
    late: str | None = None
    #: There is one slot too many: it goes when its job is over, and is killed if it has not by then.
    leaving: bool = False
    stop_by: float = NEVER
    run: Run | None = None
    #: It got SIGTERM, and so did whatever its handler keeps warm in processes of its own: it runs no other job.
    worn: bool = False
    #: Its leased job is over, and somebody looks what it left on the GPU.
    inspected: bool = False
    #: The model it keeps warm and the lease it does so under, since when, and since when it is idle.
    resident: ResidentSlot | None = None
    resident_since: float = 0.0
    idle_since: float = 0.0

    @classmethod
    def start(
        cls, nursery: Nursery, command: Sequence[str], environment: Mapping[str, str], lifeline: Lifeline, mark: str
    ) -> SlotProcess:
        """Raises OSError when there is no process, or file, to be had."""
        ours, theirs = wire.Channel.pair()
        with closing(theirs), ExitStack() as undoing:
            undoing.callback(ours.close)
            flags = Flags()
            undoing.callback(flags.close)
            child = nursery.bear(command, [theirs.fileno(), lifeline.fd, flags.fd], environment, mark)
            undoing.pop_all()
        ours.limit_sending(SEND_TIMEOUT_S)
        return cls(child, ours, flags, mark)

    @property
    def occupied(self) -> bool:
        return self.run is not None or self.inspected

    @property
    def slow(self) -> bool:
        """Whether its job has run for longer than a moment."""
        return self.run is not None and self.run.noted

    def runs(self, job_id: str, attempt: int) -> bool:
        return self.run is not None and any((one.job_id, one.attempt) == (job_id, attempt) for one in self.run.claims)

    def take(self, batch: Batch) -> None:
        """From now on it answers for these jobs; `send_jobs` tells it so."""
        self.run = Run(batch)
        if self.run.batched:
            self.flags.take_down()

    def send_jobs(self, batch: Batch) -> None:
        try:
            jobs = [_job(claim) for claim in batch]
            if batch[0].batch:
                self.pipe.send({"jobs": jobs}, f"[{','.join(claim.payload for claim in batch)}]")
            else:
                self.pipe.send({"job": jobs[0]}, batch[0].payload)
        except OSError:
            self.kill()  # it died just now, and whoever watches it answers for the job
        except Exception:
            # Too large for a frame, or for our memory. Its slot answers for it already, so it must end it, too.
            log.exception("not sent", extra=about(batch[0]))
            self.kill()

    def send(self, head: dict[str, Any], body: str = "") -> None:
        try:
            self.pipe.send(head, body)
        except OSError:
            self.kill()  # it is gone, or did not read for long: half a frame would leave it waiting for ever

    def stop(self, patience_s: float) -> None:
        """It may unload its model, and must be gone then."""
        self.leaving = True
        self.stop_by = time.monotonic() + patience_s
        self.send({"stop": True})

    def cancel(self, job_id: str, step_s: float) -> None:
        """Ask this job to stop; insist after `step_s`, kill after as much again. A signal cannot block, a pipe can.

        Its neighbours in a batch want to go on: then nobody insists, and the call has as long to return.
        """
        run = self.run
        places = [place for place, claim in enumerate(run.claims) if claim.job_id == job_id] if run else []
        if run and places and run.cancel(job_id, step_s):
            if run.batched:
                self.flags.put_up(places[0])
            else:
                self._signal(os.kill, wire.CANCEL)

    def look_at_clock(self, now: float) -> None:
        """Do what its jobs' time limits and cancels ask for by now."""
        if now >= self.stop_by or self.pipe.is_stuck(now, STUCK_S):
            self.kill()
        run = self.run
        if run is None or run.verdicts:
            return
        if now >= run.deadline:
            run.overrun()
            self.kill()
        elif now >= run.kill_at:
            run.stop()
            self.kill()
        elif now >= run.term_at:
            run.term_at = run.kill_at
            if run.unwanted:
                self.worn = True
                self._signal(os.killpg, signal.SIGTERM)
        elif run.term_at < run.kill_at and not run.batched:
            self._signal(os.kill, wire.CANCEL)  # again: the first may have come before the slot took the job

    def hand_back(self, reason: str) -> None:
        """End its jobs, which may run elsewhere."""
        if self.run is not None and not self.run.verdicts:
            self.run.hand_back(reason)
            self.kill()

    def lose_lease(self) -> None:
        """What it runs or keeps under a lease must end: by now its memory may be another's."""
        if self.resident is not None or (self.run is not None and self.run.lead.lease):
            self._end("its lease ran out")

    def lose_gpu(self, uuids: Collection[str]) -> None:
        """One of these GPUs is lost: whatever it runs or keeps there is gone."""
        if lost := [gpu for gpu in (self.run.lead.gpus if self.run else ()) if gpu.gpu_uuid in uuids]:
            self._fail(f"GPU {lost[0].gpu_index} ({lost[0].gpu_uuid}) was lost")
        elif self.resident and any(gpu.gpu_uuid in uuids for gpu in self.resident.gpus):
            self._end("the GPU of a model beside it was lost")

    def _end(self, reason: str) -> None:
        """End it. A job that has nothing to do with why may run elsewhere."""
        self.hand_back(reason)
        if self.run is None:
            self.kill()

    def _fail(self, error: str) -> None:
        if self.run is not None and not self.run.verdicts:
            self.run.lose_gpu(error)
            self.kill()

    def kill(self) -> None:
        self.dying = True
        self._signal(os.killpg, signal.SIGKILL)

    def _signal(self, send: Any, number: signal.Signals) -> None:
        try:
            send(self.process.pid, number)
        except ProcessLookupError:
            return  # the process, or the whole group, is gone already


def _job(claim: Claim) -> dict[str, Any]:
    return {
        "job_id": claim.job_id,
        "type": claim.type,
        "attempt": claim.attempt,
        "agent": claim.agent,
        "model_id": claim.model_id,
        "device": _device(claim),
        "trace_context": claim.trace_context,
        "max_runtime_sec": claim.max_runtime_sec,
    }


def _device(claim: Claim) -> str | None:
    return None if claim.lease is None else _listed(claim.gpus) or "cpu"


def _listed(gpus: Sequence[GpuShare]) -> str:
    return ",".join(gpu.gpu_uuid for gpu in gpus)


def loading(type: str, model_id: str | None, model: ResidentSlot | None) -> dict[str, Any]:
    """The context in which a model is loaded: like a job's, without a job."""
    device = _listed(model.gpus) if model else None
    return {"job_id": "", "type": type, "attempt": 0, "agent": "", "model_id": model_id, "device": device}
