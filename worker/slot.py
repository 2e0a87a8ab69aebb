"""A slot: one child process that loads handlers once and runs jobs, or batches of them, one after the other.

    python -m worker.slot FD LIFELINE_FD FLAGS_FD PARENT_PID RESULT_LIMIT [MODULE …]

It talks to its supervisor over FD and to nothing else: no database, no Redis. Whatever a handler does to this
process, the supervisor sees it end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from worker import answers, handlers, lifeline, wire
from worker.context import BatchContext, Context
from worker.flags import Flags
from worker.handlers import Cancelled, Registered

T = TypeVar("T")

#: Seconds between two looks whether anybody vouches for a leased job still.
LOOK_EVERY_S = 0.1


@dataclass
class Slot:
    pipe: Connection
    registry: dict[str, Registered]
    flags: Flags
    result_limit: int
    #: Instances of handler classes by type and model, and the device that each was loaded for.
    warm: dict[tuple[str, str | None], tuple[Any, str | None]] = field(default_factory=dict)
    cancelled: bool = False
    busy: bool = False
    leased: bool = False
    questions: int = 0

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
        wire.send(self.pipe, self._introduction())
        while True:
            head, body = wire.receive(self.pipe)
            if "stop" in head:
                break
            if "job" in head:
                wire.send(self.pipe, *self._run_job(head["job"], body))
            elif "jobs" in head:
                wire.send(self.pipe, *self._run_batch(head["jobs"], body))
            # Anything else is the answer to a question of a job that did not wait for it.
        for model in list(self.warm):
            self._unload(model)

    def _introduction(self) -> dict[str, Any]:
        known = self.registry.items()
        return {
            "hello": {name: registered.min_memory_mb for name, registered in known},
            "pinned": [name for name, registered in known if registered.pinned],
            "batches": {name: [one.batch, one.batch_wait_ms] for name, one in known if one.batch},
        }

    def _run_job(self, job: dict[str, Any], body: str) -> tuple[dict[str, Any], str]:
        """Run one job; how it ended, and the result's JSON."""
        self.cancelled = False
        ctx = Context(**job, _report=self._report, _is_cancelled=lambda: self.cancelled, _owns=self._owns)
        (ending, result), about = self._under_lease(
            ctx, lambda: answers.of_job(lambda: self._call(ctx, body), self.result_limit)
        )
        return {"end": ending | about}, result

    def _run_batch(self, jobs: list[dict[str, Any]], body: str) -> tuple[dict[str, Any], str]:
        """Run jobs in one call; how each ended, and their results one behind the other."""
        each = tuple(self._member(place, job) for place, job in enumerate(jobs))
        ctx = BatchContext(each[0].type, each[0].model_id, each[0].device, each)
        said, about = self._under_lease(
            ctx, lambda: answers.of_batch(lambda: self._call(ctx, body), len(each), self.result_limit)
        )
        ends = [ending | about | {"size": len(result)} for ending, result in said]
        return {"ends": ends}, "".join(result for _, result in said)

    def _member(self, place: int, job: dict[str, Any]) -> Context:
        return Context(
            **job,
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
        started = time.monotonic()
        said = run()
        # A model that stays in memory does so under a lease too; jobs without a GPU leave it there.
        keeps = (ctx.type, ctx.model_id) in self.warm
        self.leased = keeps if on_gpu else before
        return said, {"keeps": keeps, "run_seconds": time.monotonic() - started}

    def _call(self, ctx: Context | BatchContext, body: str) -> object:
        self.busy = True
        try:
            return self._handler(ctx)(ctx, json.loads(body))
        finally:
            self.busy = False

    def _handler(self, ctx: Context | BatchContext) -> Callable[[Any, Any], Any]:
        registered = self.registry[ctx.type]
        if not registered.is_class:
            return registered.target
        model = (ctx.type, ctx.model_id)
        if model in self.warm and self.warm[model][1] != ctx.device:
            self._unload(model)
        if model not in self.warm:
            instance = registered.target()
            if hasattr(instance, "load"):
                instance.load(ctx)
            self.warm[model] = instance, ctx.device
        run: Callable[[Any, Any], Any] = self.warm[model][0].run
        return run

    def _unload(self, model: tuple[str, str | None]) -> None:
        instance, _ = self.warm.pop(model)
        if hasattr(instance, "unload"):
            instance.unload()

    def _owns(self, place: int = 0) -> bool:
        self.questions += 1
        wire.send(self.pipe, {"owns": self.questions, "place": place})
        while True:
            head, _ = wire.receive(self.pipe)
            if head.get("question") == self.questions:
                return bool(head["owns"])

    def _report(self, fraction: float, note: str, place: int = 0) -> None:
        wire.send(self.pipe, {"progress": [fraction, note], "place": place})


def main() -> None:
    fd, lifeline_fd, flags_fd, parent_pid, result_limit, *modules = sys.argv[1:]
    wire.die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which decides what happens here
    for inherited in (int(fd), int(lifeline_fd), int(flags_fd)):
        os.set_inheritable(inherited, False)
    pipe = Connection(int(fd))
    try:
        slot = Slot(pipe, handlers.load(modules), Flags(int(flags_fd)), int(result_limit))
        slot.listen()
        lifeline.end_when_over(lifeline.Lifeline(int(lifeline_fd)), lambda: slot.leased, LOOK_EVERY_S)
        slot.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the supervisor is gone, and so are we


if __name__ == "__main__":
    main()
