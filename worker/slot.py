"""A slot: one child process that loads handlers once and runs jobs, or batches of them, one after the other.

    FD LIFELINE_FD FLAGS_FD PARENT_PID RESULT_LIMIT POOL [MODULE …]

are its arguments; POOL is the adapter and the variant of the pool that it belongs to, as JSON, and how to trace, if
anybody wants that.

It talks to its supervisor over FD and to nothing else: no database, no Redis. Whatever a handler does to this
process, the supervisor sees it end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.modules import not_there
from orchestrator.telemetry import tracing
from worker import answers, handlers, wire
from worker.answers import NotVouchedFor
from worker.context import BatchContext, Context
from worker.flags import Flags
from worker.handlers import Cancelled, NotLoaded, Permanent, Registered
from worker.lifeline import Lifeline, end_when_over
from worker.models import Models
from worker.results import Page, Result

if TYPE_CHECKING:
    from orchestrator.telemetry.attempts import Attempts, Running

T = TypeVar("T")

#: Seconds between two looks whether anybody vouches for a leased job still.
LOOK_EVERY_S = 0.1
#: Characters of why its handlers do not load, and of where.
MAX_REASON, MAX_TRACE = 500, 20_000


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
    #: A handler may have threads: one of them asks at a time.
    asking: threading.RLock = field(default_factory=threading.RLock)
    #: Makes the spans of jobs; None: nobody traces.
    attempts: Attempts | None = None
    #: The spans of what runs now.
    running: Running | None = None

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
            return {"load_failed": answers.said(error)}
        return {"loaded": about["load_seconds"]}

    def _run_job(self, job: dict[str, Any], body: str) -> tuple[dict[str, Any], str]:
        """Run one job; how it ended, and the result's JSON."""
        self.cancelled = False
        return self._traced([job], lambda: self._one(job, body), lambda head: [head["end"]])

    def _one(self, job: dict[str, Any], body: str) -> tuple[dict[str, Any], str]:
        ctx = self._context(job)
        (ending, result), about = self._under_lease(
            ctx, lambda: answers.of_job(lambda: self._call(ctx, body), self.result_limit)
        )
        return {"end": ending | about | _added(ctx)}, result

    def _run_batch(self, jobs: list[dict[str, Any]], body: str) -> tuple[dict[str, Any], str]:
        """Run jobs in one call; how each ended, and their results one behind the other."""
        return self._traced(jobs, lambda: self._many(jobs, body), lambda head: head["ends"])

    def _many(self, jobs: list[dict[str, Any]], body: str) -> tuple[dict[str, Any], str]:
        each = tuple(self._member(place, job) for place, job in enumerate(jobs))
        ctx = BatchContext(each[0].type, each[0].model_id, each[0].device, each, **self.pool)
        said, about = self._under_lease(
            ctx, lambda: answers.of_batch(lambda: self._call(ctx, body), len(each), self.result_limit)
        )
        counted = zip(said, each, strict=True)
        ends = [ending | about | _added(job) | {"size": len(result)} for (ending, result), job in counted]
        return {"ends": ends}, "".join(result for _, result in said)

    def _traced(
        self,
        jobs: list[dict[str, Any]],
        run: Callable[[], tuple[dict[str, Any], str]],
        ends_in: Callable[[dict[str, Any]], list[dict[str, Any]]],
    ) -> tuple[dict[str, Any], str]:
        """Run them within spans of their own, if anybody traces; `ends_in` finds their ends in the answer."""
        if self.attempts is None:
            return run()
        with self.attempts.running(jobs) as running:
            self.running = running
            try:
                for job, context in zip(jobs, running.contexts, strict=True):
                    job["trace_context"] = context
                head, results = run()
                running.ended(ends_in(head))
            finally:
                self.running = None
        return head, results

    def _context(self, job: dict[str, Any]) -> Context:
        return self._member(0, job, lambda: self.cancelled)

    def _member(self, place: int, job: dict[str, Any], is_cancelled: Callable[[], bool] | None = None) -> Context:
        return Context(
            **job,
            **self.pool,
            result_limit=self.result_limit,
            _report=partial(self._report, place=place),
            _is_cancelled=is_cancelled or partial(self.flags.is_up, place),
            _owns=partial(self._owns, place),
            _keep=partial(self._keep, place),
            _fetch=partial(self._fetch, place),
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
            value = self.models.handler(ctx)(ctx, json.loads(body))
            for job in ctx.jobs:
                job.flush()
            if self.running is not None:
                self.running.returned(value)
            return value
        except Exception as error:
            if self.running is not None:
                self.running.raised(error)
            self.models.dismiss_broken(ctx)
            raise
        finally:
            self.busy = False

    def _owns(self, place: int) -> bool:
        head, _ = self._question("owns", place)
        return bool(head.get("owns"))

    def _keep(self, place: int, number: int, frame: str) -> None:
        """Have tasks kept until the attempt has ended."""
        head, _ = self._question("stage", place, frame, seq=number)
        if "refused" in head:
            raise Permanent(f"it adds tasks that cannot be: {head['refused']}")
        if "failed" in head:
            raise RuntimeError(f"the tasks that it adds could not be kept: {head['failed']}")

    def _fetch(self, place: int, after: int, name: str | None) -> Page:
        head, body = self._question("inputs", place, after=after, name=name)
        if "inputs" not in head:
            raise RuntimeError(f"results could not be fetched: {head.get('failed') or head.get('refused')}")
        found = zip(head["inputs"], json.loads(body), strict=True)
        return Page([Result._make([*one, value]) for one, value in found], head["more"])

    def _question(self, what: str, place: int, body: str = "", **more: Any) -> wire.Frame:
        """Ask the supervisor, who asks the database. Answers to those who did not wait for them are passed over."""
        with self.asking:
            self.questions += 1
            self.pipe.send({"question": self.questions, "asks": what, "place": place, **more}, body)
            while True:
                head, text = self.pipe.receive()
                if head.get("question") == self.questions:
                    return head, text

    def _report(self, fraction: float, note: str, place: int = 0) -> None:
        self.pipe.send({"progress": [fraction, note], "place": place})


def _added(ctx: Context) -> dict[str, int]:
    return {"spawned": ctx.added} if ctx.added else {}


def _loaded(modules: list[str], pipe: wire.Channel) -> dict[str, Registered]:
    """The handlers; the supervisor is told why there are none."""
    try:
        return handlers.load(modules, lambda why: pipe.send({"silent": why}))
    except NotLoaded as failed:
        if failed.missing is not None:
            pipe.send({"unfit": not_there(failed.named, failed.missing), "missing": True})
            sys.exit(1)  # a trace tells nothing else
        cause = failed.__cause__ or failed
        why = " ".join(f"{failed}: {answers.said(cause)}".split())
        # The supervisor tells it, once for all slots and all tries.
        pipe.send({"unfit": why[:MAX_REASON], "missing": False, "trace": answers.trace(cause)[-MAX_TRACE:]})
        sys.exit(1)


def main() -> None:
    fd, lifeline_fd, flags_fd, parent_pid, result_limit, pool, *modules = sys.argv[1:]
    wire.die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which decides what happens here
    for inherited in (int(fd), int(lifeline_fd), int(flags_fd)):
        os.set_inheritable(inherited, False)
    pipe = wire.Channel(socket.socket(fileno=int(fd)))
    about = json.loads(pool)
    traced = about.pop("tracing", None)
    attempts = tracing.start_slot(lambda spans: pipe.send({"spans": True}, spans), **traced) if traced else None
    try:
        lifeline, flags = Lifeline(int(lifeline_fd)), Flags(int(flags_fd))
        slot = Slot(pipe, _loaded(modules, pipe), flags, lifeline, int(result_limit), about, attempts=attempts)
        slot.listen()
        end_when_over(lifeline, lambda: slot.leased, LOOK_EVERY_S)
        slot.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the supervisor is gone, and so are we
