"""A slot: one child process that loads handlers once and runs jobs one after the other.

    python -m worker.slot FD LIFELINE_FD PARENT_PID RESULT_LIMIT POOL [MODULE …]

POOL is the adapter and the variant of the pool that it belongs to, as JSON.

It talks to its supervisor over FD and to nothing else: no database, no Redis. Whatever a handler does to this
process, the supervisor sees it end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.errors import InvalidInput
from orchestrator.jsontext import canonical_json
from worker import handlers, lifeline, wire
from worker.context import Context
from worker.handlers import Cancelled, Permanent, Registered, Retry, Skip

#: Levels a result may nest, as a payload may by default.
MAX_DEPTH = 64
#: Seconds between two looks whether anybody vouches for a leased job still.
LOOK_EVERY_S = 0.1


@dataclass
class Slot:
    pipe: Connection
    registry: dict[str, Registered]
    result_limit: int
    #: What its pool adds to every job's context.
    pool: dict[str, Any] = field(default_factory=dict)
    #: Instances of handler classes by type and model, and the device that each was loaded for.
    warm: dict[tuple[str, str | None], tuple[Any, str | None]] = field(default_factory=dict)
    cancelled: bool = False
    busy: bool = False
    leased: bool = False
    questions: int = 0
    #: Seconds that the model of the last job took to load; 0 when it was there.
    load_s: float = 0.0

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
        memory = {name: registered.min_memory_mb for name, registered in self.registry.items()}
        pinned = [name for name, registered in self.registry.items() if registered.pinned]
        classes = [name for name, registered in self.registry.items() if registered.is_class]
        wire.send(self.pipe, {"hello": memory, "pinned": pinned, "classes": classes})
        while True:
            head, body = wire.receive(self.pipe)
            if "stop" in head:
                break
            if "load" in head:
                wire.send(self.pipe, self._preload(head["load"]))
                continue
            if "job" not in head:
                continue  # the answer to a question of a job that did not wait for it
            ending, result = self._attempt(head, body)
            wire.send(self.pipe, {"end": ending}, result)
        for model in list(self.warm):
            self._unload(model)

    def _preload(self, head: dict[str, Any]) -> dict[str, Any]:
        """Load a model before any job needs it; the answer for the supervisor."""
        ctx = self._context(head)
        self.leased = ctx.device is not None
        started = time.monotonic()
        try:
            self._handler(ctx)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is its answer
            return {"load_failed": f"{type(error).__name__}: {error}"}
        return {"loaded": time.monotonic() - started}

    def _context(self, head: dict[str, Any]) -> Context:
        ctx = Context(
            **head,
            **self.pool,
            result_limit=self.result_limit,
            _report=self._report,
            _is_cancelled=lambda: self.cancelled,
            _owns=self._owns,
        )
        if ctx.device is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = "" if ctx.device == "cpu" else ctx.device
        return ctx

    def _attempt(self, head: dict[str, Any], body: str) -> tuple[dict[str, Any], str]:
        """Run one job; the ending as the supervisor wants to hear it, and the result's JSON."""
        self.cancelled = False
        ctx = self._context(head["job"])
        before, on_gpu = self.leased, ctx.device not in (None, "cpu")
        self.leased = before or ctx.device is not None
        self.load_s = 0.0
        started = time.monotonic()
        ending, result = self._outcome(ctx, body)
        # A model that stays in memory does so under a lease too; jobs without a GPU leave it there.
        ending["keeps"] = (ctx.type, ctx.model_id) in self.warm
        self.leased = ending["keeps"] if on_gpu else before
        ending["load_seconds"] = self.load_s
        ending["run_seconds"] = time.monotonic() - started - self.load_s
        return ending, result

    def _outcome(self, ctx: Context, body: str) -> tuple[dict[str, Any], str]:
        try:
            self.busy = True
            try:
                value = self._call(ctx, json.loads(body))
            finally:
                self.busy = False
        except Cancelled as cancelled:
            return _failed("transient", cancelled) | {"outcome": "cancelled"}, ""  # a failure, if nobody cancelled it
        except Skip as skip:
            return {"outcome": "skipped", "error": str(skip)}, ""
        except Permanent as permanent:
            return _failed("permanent", permanent), ""
        except Retry as retry:
            return _failed("transient", retry) | {"retry_after_s": retry.after}, ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is its answer
            return _failed("transient", error) | {"error": traceback.format_exc(limit=-8)}, ""
        return self._checked(value)

    def _call(self, ctx: Context, payload: Any) -> Any:
        try:
            return self._handler(ctx)(ctx, payload)
        except Exception:
            self._dismiss_broken((ctx.type, ctx.model_id))
            raise

    def _handler(self, ctx: Context) -> Callable[[Context, Any], Any]:
        registered = self.registry[ctx.type]
        if not registered.is_class:
            return registered.target
        model = (ctx.type, ctx.model_id)
        if model in self.warm and self.warm[model][1] != ctx.device:
            self._unload(model)
        self._dismiss_broken(model)
        if model not in self.warm:
            started = time.monotonic()
            instance = registered.target()
            if hasattr(instance, "load"):
                instance.load(ctx)
            self.load_s = time.monotonic() - started
            self.warm[model] = instance, ctx.device
        run: Callable[[Context, Any], Any] = self.warm[model][0].run
        return run

    def _dismiss_broken(self, model: tuple[str, str | None]) -> None:
        """A model that says that it is not there any more is not kept, and loaded anew for the next job."""
        healthy = getattr(self.warm[model][0], "healthy", None) if model in self.warm else None
        if healthy is not None and not healthy():
            self._unload(model)

    def _unload(self, model: tuple[str, str | None]) -> None:
        instance, _ = self.warm.pop(model)
        if hasattr(instance, "unload"):
            instance.unload()

    def _checked(self, value: object) -> tuple[dict[str, Any], str]:
        """A result must be JSON of bounded size; anything else cannot be stored, and trying again will not help."""
        try:
            text = canonical_json(value, "result", MAX_DEPTH)
            size = len(text.encode())
        except InvalidInput as unfit:
            return {"outcome": "failed", "error_kind": "bad_result", "error": str(unfit)}, ""
        if size > self.result_limit:
            error = f"result has {size} bytes, the limit is {self.result_limit}; store it elsewhere, return a reference"
            return {"outcome": "failed", "error_kind": "bad_result", "error": error}, ""
        return {"outcome": "done"}, text

    def _owns(self) -> bool:
        self.questions += 1
        wire.send(self.pipe, {"owns": self.questions})
        while True:
            head, _ = wire.receive(self.pipe)
            if head.get("question") == self.questions:
                return bool(head["owns"])

    def _report(self, fraction: float, note: str) -> None:
        wire.send(self.pipe, {"progress": [fraction, note]})


def _failed(kind: str, error: BaseException) -> dict[str, Any]:
    return {"outcome": "failed", "error_kind": kind, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    fd, lifeline_fd, parent_pid, result_limit, pool, *modules = sys.argv[1:]
    wire.die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which decides what happens here
    for inherited in (int(fd), int(lifeline_fd)):
        os.set_inheritable(inherited, False)
    pipe = Connection(int(fd))
    try:
        slot = Slot(pipe, handlers.load(modules), int(result_limit), json.loads(pool))
        slot.listen()
        lifeline.end_when_over(lifeline.Lifeline(int(lifeline_fd)), lambda: slot.leased, LOOK_EVERY_S)
        slot.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the supervisor is gone, and so are we


if __name__ == "__main__":
    main()
