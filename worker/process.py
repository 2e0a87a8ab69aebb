"""One slot's process, as its supervisor sees it: started, given a job, asked to stop, killed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.gpu.processes import MARK
from orchestrator.jobs import ErrorKind
from orchestrator.leases import GpuShare, ResidentSlot
from orchestrator.store.claim import Claim
from orchestrator.store.settle import End, Outcome
from worker import wire
from worker.lifeline import Lifeline

#: Longest pause a handler may ask for.
MAX_RETRY_AFTER_S = 31_536_000.0

#: Seconds in which a slot must take what it is sent.
SEND_TIMEOUT_S = 5
#: Seconds in which the rest of a frame must follow its beginning. All other slots wait meanwhile.
RECEIVE_TIMEOUT_S = 2

NEVER = float("inf")


@dataclass
class SlotProcess:
    """`claim` is what it runs; it is free when it said hello and runs nothing."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    pidfd: int
    #: WORKER_ID#NUMBER: what its processes are recognised by, also after its end.
    mark: str = ""
    born: float = field(default_factory=time.monotonic)
    #: It has not said hello yet.
    starting: bool = True
    ready: bool = False
    dying: bool = False
    #: It waits for what it is to load, or loads it.
    unloaded: bool = False
    loading: bool = False
    #: There is one slot too many: it goes when its job is over, and is killed if it has not by then.
    leaving: bool = False
    stop_by: float = NEVER
    claim: Claim | None = None
    since: float = NEVER
    deadline: float = NEVER
    #: When its job, having been cancelled, gets SIGTERM and SIGKILL.
    term_at: float = NEVER
    kill_at: float = NEVER
    #: It got SIGTERM, and so did whatever its handler keeps warm in processes of its own: it runs no other job.
    worn: bool = False
    #: Why we killed it: the answer to the job it ran.
    verdict: End | None = None
    #: Its leased job is over, and somebody looks what it left on the GPU.
    inspected: bool = False
    #: The model it keeps warm and the lease it does so under, since when, and since when it is idle.
    resident: ResidentSlot | None = None
    resident_since: float = 0.0
    idle_since: float = 0.0

    @classmethod
    def start(cls, command: list[str], environment: Mapping[str, str], lifeline: Lifeline, mark: str) -> SlotProcess:
        ours, theirs = Pipe(duplex=True)
        arguments = [str(theirs.fileno()), str(lifeline.fd), str(os.getpid()), *command]
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.slot", *arguments],
            pass_fds=[theirs.fileno(), lifeline.fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a process group of its own, to be killed as one
            # The last keeps programs that name their processes from writing over the mark.
            env={**_without_settings(os.environ), **environment, MARK: mark, "SPT_NOENV": "1"},
        )
        theirs.close()
        _limit_waits(ours)
        return cls(process, ours, os.pidfd_open(process.pid), mark)

    @property
    def occupied(self) -> bool:
        return self.claim is not None or self.inspected

    def take(self, claim: Claim) -> None:
        """From now on it answers for this job; `send_job` tells it so."""
        self.claim, self.since = claim, time.monotonic()
        self.deadline = self.since + (claim.max_runtime_sec or NEVER)
        self.term_at = self.kill_at = NEVER

    def send_job(self, claim: Claim) -> None:
        try:
            wire.send(self.pipe, {"job": _job(claim)}, claim.payload)
        except (OSError, TypeError, ValueError):
            # It died just now, and whoever watches it answers for the job. A pipe that is closed in the middle of a
            # frame raises TypeError: its number has become None.
            self.kill()

    def send(self, head: dict[str, Any]) -> None:
        try:
            wire.send(self.pipe, head)
        except (OSError, TypeError, ValueError):
            return  # its end is noticed by whoever watches it

    def stop(self, patience_s: float) -> None:
        """It may unload its model, and must be gone then."""
        self.leaving = True
        self.stop_by = time.monotonic() + patience_s
        self.send({"stop": True})

    def cancel(self, step_s: float) -> None:
        """Ask its job to stop; insist after `step_s`, kill after as much again. A signal cannot block, a pipe can."""
        if self.term_at == NEVER:
            self.term_at = time.monotonic() + step_s
            self.kill_at = self.term_at + step_s
            self._signal(os.kill, wire.CANCEL)

    def look_at_clock(self, now: float) -> None:
        """Do what its job's time limit and its cancel ask for by now."""
        if now >= self.stop_by:
            self.kill()
        if self.claim is None or self.verdict is not None:
            return
        if now >= self.deadline:
            self.verdict = _overran(self.claim)
            self.kill()
        elif now >= self.kill_at:
            self.kill()
        elif now >= self.term_at:
            self.term_at = self.kill_at
            self.worn = True
            self._signal(os.killpg, signal.SIGTERM)
        elif self.term_at < self.kill_at:
            self._signal(os.kill, wire.CANCEL)  # again: the first may have come before the slot took the job

    def hand_back(self, reason: str) -> None:
        """End its job, which may run elsewhere."""
        if self.claim is not None and self.verdict is None:
            self.verdict = End(self.claim.job_id, self.claim.attempt, Outcome.HANDED_BACK, error=reason)
            self.kill()

    def lose_lease(self) -> None:
        """What it runs or keeps under a lease must end: by now its memory may be another's."""
        if self.resident is not None or (self.claim is not None and self.claim.lease):
            self._end("its lease ran out")

    def lose_gpu(self, uuids: Collection[str]) -> None:
        """One of these GPUs is lost: whatever it runs or keeps there is gone."""
        if lost := [gpu for gpu in (self.claim.gpus if self.claim else ()) if gpu.gpu_uuid in uuids]:
            self._fail(f"GPU {lost[0].gpu_index} ({lost[0].gpu_uuid}) was lost")
        elif self.resident and any(gpu.gpu_uuid in uuids for gpu in self.resident.gpus):
            self._end("the GPU of a model beside it was lost")

    def _end(self, reason: str) -> None:
        """End it. A job that has nothing to do with why may run elsewhere."""
        self.hand_back(reason)
        if self.claim is None:
            self.kill()

    def _fail(self, error: str) -> None:
        if self.claim is not None and self.verdict is None:
            job_id, attempt = self.claim.job_id, self.claim.attempt
            self.verdict = End(job_id, attempt, Outcome.FAILED, error_kind=ErrorKind.GPU_LOST, error=error)
            self.kill()

    def kill(self) -> None:
        self.dying = True
        self._signal(os.killpg, signal.SIGKILL)

    def _signal(self, send: Any, number: signal.Signals) -> None:
        try:
            send(self.process.pid, number)
        except ProcessLookupError:
            return  # the process, or the whole group, is gone already

    def end_of(self, claim: Claim, ending: dict[str, Any], body: str) -> End:
        """What the slot said about its job, as the store wants to hear it."""
        kind = ending.get("error_kind")
        return End(
            claim.job_id,
            claim.attempt,
            Outcome(ending["outcome"]),
            run_seconds=float(ending["run_seconds"]),
            result=body or None,
            error_kind=ErrorKind(kind) if kind else None,
            error=ending.get("error"),
            retry_after_s=_bounded(ending.get("retry_after_s")),
            lease_key=claim.lease_key,
        )

    def end_of_dead(self, claim: Claim, code: int) -> End:
        """The answer to the job of a process that is gone."""
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        error = f"the process that ran it {how}"
        crashed = End(claim.job_id, claim.attempt, Outcome.FAILED, error_kind=ErrorKind.WORKER_LOST, error=error)
        return self.verdict or crashed


def _limit_waits(pipe: Connection) -> None:
    """The other end may be frozen half-way through a frame larger than the pipe: then it is killed, not waited for."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", RECEIVE_TIMEOUT_S, 0))


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Handlers get no database password: what they need comes with the job."""
    return {name: value for name, value in environ.items() if not name.startswith("ORCH_")}


def _job(claim: Claim) -> dict[str, Any]:
    return {
        "job_id": claim.job_id,
        "type": claim.type,
        "attempt": claim.attempt,
        "agent": claim.agent,
        "model_id": claim.model_id,
        "device": _device(claim),
        "trace_context": claim.trace_context,
    }


def _device(claim: Claim) -> str | None:
    return None if claim.lease is None else _listed(claim.gpus) or "cpu"


def _listed(gpus: Sequence[GpuShare]) -> str:
    return ",".join(gpu.gpu_uuid for gpu in gpus)


def loading(type: str, model_id: str | None, model: ResidentSlot | None) -> dict[str, Any]:
    """The context in which a model is loaded: like a job's, without a job."""
    device = _listed(model.gpus) if model else None
    return {"job_id": "", "type": type, "attempt": 0, "agent": "", "model_id": model_id, "device": device}


def _bounded(seconds: object) -> float | None:
    """A pause within a year; anything else a handler asks for is left to the usual backoff."""
    return seconds if isinstance(seconds, int | float) and 0 <= seconds <= MAX_RETRY_AFTER_S else None


def _overran(claim: Claim) -> End:
    limit = claim.max_runtime_sec or 0.0
    error = f"ran longer than max_runtime_sec = {limit}"
    return End(
        claim.job_id,
        claim.attempt,
        Outcome.FAILED,
        run_seconds=limit,
        error_kind=ErrorKind.TIMEOUT,
        error=error,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
