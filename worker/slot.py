"""A slot: one child process that loads handlers once and runs jobs, or batches of them, one after the other.

    FD LIFELINE_FD FLAGS_FD PARENT_PID RESULT_LIMIT POOL [MODULE …]

are its arguments; POOL is the adapter and the variant of the pool that it belongs to, as JSON.

It talks to its supervisor over FD and to nothing else: no database, no Redis. Whatever a handler does to this
process, the supervisor sees it end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from worker import answers, handlers, wire
from worker.answers import NotVouchedFor
from worker.context import BatchContext, Context
from worker.flags import Flags
from worker.handlers import Cancelled, Registered
from worker.lifeline import Lifeline, end_when_over
from worker.models import Models

T = TypeVar("T")

#: Seconds between two looks whether anybody vouches for a leased job still.
LOOK_EVERY_S = 0.1


@dataclass
class Slot:
    pipe: wire.Channel
    registry: dict[str, Registered]
    flags: Flags
    lifeline: Lifeline
    result_limit: int
    #: What its pool adds to every job's context.
    pool: dict[str, Any] = field(default_factory=dict)
    cancelled: bool = False
    busy: bool = False
    leased: bool = False
    questions: int = 0

    def __post_init__(self) -> None:
        self.models = Models(self.registry)

    def listen(self) -> None:
        """Hear that the job is cancelled: a flag at first, an exception in the handler when it does not look."""
        signal.signal(wire.CANCEL, self._ask)
        signal.signal(signal.SIGTERM, self._insist)

    def _ask(self, _number: int, _frame: object) -> None:
        self.cancelled = True

    def _insist(self, _number: int, _frame: object) -> None:
        self.cancelled = True
        if self.busy:
            raise Cancelled("asked to stop")

    def run(self) -> None:
        self.pipe.send(self._introduction())
        while True:
            head, body = self.pipe.receive()
            if "stop" in head:
                break
            if "load" in head:
                self.pipe.send(self._preload(head["load"]))
            elif "job" in head:
                self.pipe.send(*self._run_job(head["job"], body))
            elif "jobs" in head:
                self.pipe.send(*self._run_batch(head["jobs"], body))
            # Anything else is the answer to a question of a job that did not wait for it.
        self.models.unload_all()

    def _introduction(self) -> dict[str, Any]:
        known = self.registry.items()
        return {
            "hello": {name: registered.min_memory_mb for name, registered in known},
            "classes": [name for name, registered in known if registered.is_class],
            "pinned": [name for name, registered in known if registered.pinned],
            "batches": {name: [one.batch, one.batch_wait_ms] for name, one in known if one.batch},
        }

    def _preload(self, head: dict[str, Any]) -> dict[str, Any]:
        """Load a model before any job needs it; the answer for the supervisor."""
        ctx = self._context(head)
        try:
            _, about = self._under_lease(ctx, lambda: self.models.handler(ctx))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is its answer
            return {"load_failed": f"{type(error).__name__}: {error}"}
        return {"loaded": about["load_seconds"]}

    def _run_job(self, job: dict[str, Any], body: str) -> tuple[dict[str, Any], str]:
        """Run one job; how it ended, and the result's JSON."""
        self.cancelled = False
        ctx = self._context(job)
        (ending, result), about = self._under_lease(
            ctx, lambda: answers.of_job(lambda: self._call(ctx, body), self.result_limit)
        )
        return {"end": ending | about}, result

    def _run_batch(self, jobs: list[dict[str, Any]], body: str) -> tuple[dict[str, Any], str]:
        """Run jobs in one call; how each ended, and their results one behind the other."""
        each = tuple(self._member(place, job) for place, job in enumerate(jobs))
        ctx = BatchContext(each[0].type, each[0].model_id, each[0].device, each, **self.pool)
        said, about = self._under_lease(
            ctx, lambda: answers.of_batch(lambda: self._call(ctx, body), len(each), self.result_limit)
        )
        ends = [ending | about | {"size": len(result)} for ending, result in said]
        return {"ends": ends}, "".join(result for _, result in said)

    def _context(self, job: dict[str, Any]) -> Context:
        return Context(
            **job,
            **self.pool,
            result_limit=self.result_limit,
            _report=self._report,
            _is_cancelled=lambda: self.cancelled,
            _owns=self._owns,
        )

    def _member(self, place: int, job: dict[str, Any]) -> Context:
        return Context(
            **job,
            **self.pool,
            result_limit=self.result_limit,
            _report=partial(self._report, place=place),
            _is_cancelled=partial(self.flags.is_up, place),
            _owns=partial(self._owns, place),
        )

    def _under_lease(self, ctx: Context | BatchContext, run: Callable[[], T]) -> tuple[T, dict[str, Any]]:
        """Show the handler its GPU and run it; its answer, how long it ran and whether its model stays."""
        if ctx.device is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = "" if ctx.device == "cpu" else ctx.device
        before, on_gpu = self.leased, ctx.device not in (None, "cpu")
        self.leased = before or ctx.device is not None
        self.models.load_s = 0.0
        started = time.monotonic()
        said = run()
        # A model that stays in memory does so under a lease too; jobs without a GPU leave it there.
        keeps, load_s = (ctx.type, ctx.model_id) in self.models, self.models.load_s
        self.leased = keeps if on_gpu else before
        run_s = time.monotonic() - started - load_s
        return said, {"keeps": keeps, "load_seconds": load_s, "run_seconds": run_s}

    def _call(self, ctx: Context | BatchContext, body: str) -> object:
        if not self.lifeline.vouched:
            raise NotVouchedFor("nobody vouches for the worker that claimed it: its heartbeats are late")
        self.busy = True
        try:
            return self.models.handler(ctx)(ctx, json.loads(body))
        except Exception:
            self.models.dismiss_broken(ctx)
            raise
        finally:
            self.busy = False

    def _owns(self, place: int = 0) -> bool:
        self.questions += 1
        self.pipe.send({"owns": self.questions, "place": place})
        while True:
            head, _ = self.pipe.receive()
            if head.get("question") == self.questions:
                return bool(head["owns"])

    def _report(self, fraction: float, note: str, place: int = 0) -> None:
        self.pipe.send({"progress": [fraction, note], "place": place})


def main() -> None:
    fd, lifeline_fd, flags_fd, parent_pid, result_limit, pool, *modules = sys.argv[1:]
    wire.die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which decides what happens here
    for inherited in (int(fd), int(lifeline_fd), int(flags_fd)):
        os.set_inheritable(inherited, False)
    pipe = wire.Channel(socket.socket(fileno=int(fd)))
    try:
        lifeline, flags = Lifeline(int(lifeline_fd)), Flags(int(flags_fd))
        slot = Slot(pipe, handlers.load(modules), flags, lifeline, int(result_limit), json.loads(pool))
        slot.listen()
        end_when_over(lifeline, lambda: slot.leased, LOOK_EVERY_S)
        slot.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the supervisor is gone, and so are we
