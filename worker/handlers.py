"""Handlers are registered by the worker's operator; a job's `type` only selects one. Nothing in a job is imported."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Self, TypeVar

from orchestrator.batching import MAX_BATCH

#: Entry point group under which installed packages offer handler modules.
ENTRY_POINTS = "gpuorch.handlers"
BUILTIN = "worker.builtin"
#: Milliseconds for which the first job of a batch waits for others: by default, and at most (a slot is kept meanwhile).
BATCH_WAIT_MS, MAX_BATCH_WAIT_MS = 5.0, 1000.0

Target = TypeVar("Target", bound=Callable[..., Any])


class Permanent(Exception):
    """The job can never succeed: `failed`, no retry."""


class Skip(Exception):
    """There is nothing to do: `skipped`, which is no error."""


class Cancelled(BaseException):
    """The job was cancelled. Raise it when `ctx.cancelled` turned true; after a while it is raised for you.

    No Exception, so that a handler's own `except Exception` does not swallow it on the way out.
    """


class Retry(Exception):
    """Try again, after a while of the handler's choosing."""

    def __init__(self, message: str = "the handler asked for a retry", *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class OutOfTime(Retry):
    """The job's `max_runtime_sec` is nearly over: raise it when `ctx.out_of_time` turned true, or be killed soon."""


class NotLoaded(Exception):
    """A module of handlers could not be imported, for the reason that caused this."""

    def __init__(self, named: str, module: str, error: BaseException) -> None:
        super().__init__(f"{named} does not load")
        #: Where somebody named it, and what is missing of it: itself, or a package that it should be in.
        self.named = named
        self.missing = error.name if isinstance(error, ModuleNotFoundError) and _is_of(error.name, module) else None


@dataclass(frozen=True)
class Registered:
    type: str
    target: Callable[..., Any]
    min_memory_mb: int
    #: Its model, once warm, leaves the GPU for nobody.
    pinned: bool = False
    #: Jobs that one call takes; None when it takes a payload instead of a list of them.
    batch: int | None = None
    #: How long the first of a batch waits for others.
    batch_wait_ms: float = 0.0

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.target)


@dataclass(frozen=True)
class Batching:
    """By type, as its handler declares it: how many jobs make a full batch, how long the first waits for others."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    waits_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def declared(cls, batches: Mapping[str, tuple[int, float]]) -> Self:
        sizes = {type: int(size) for type, (size, _) in batches.items()}
        return cls(sizes, {type: wait_ms / 1000 for type, (_, wait_ms) in batches.items()})

    def wait_s(self, type: str) -> float:
        """Whoever runs by itself waits for nobody."""
        return self.waits_s.get(type, 0.0)


_registry: dict[str, Registered] = {}


def handler(
    type: str,
    *,
    min_memory_mb: int = 0,
    pinned: bool = False,
    batch: int | None = None,
    batch_wait_ms: float = BATCH_WAIT_MS,
) -> Callable[[Target], Target]:
    """Register a function `(ctx, payload) -> result`, or a class with `run` (and `load`, `unload`), for a job type.

    A class that holds GPU memory after a job stays warm: the next job of its type finds it loaded. It leaves when
    others need the room, unless it is `pinned`. One with a method `healthy` is asked before each job and after each
    that failed: False means unloaded, and loaded anew for the next.

    With `batch` it is called once for up to so many waiting jobs, `(ctx, payloads) -> results`: a list with a result
    or an exception for each, which is handled as if raised for that job alone. The first waits at most `batch_wait_ms`
    for others. The memory is that of the whole batch.
    """
    if batch is not None and not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"batch of {type!r} must be from 1 to {MAX_BATCH}, not {batch}")
    if not 0 <= batch_wait_ms <= MAX_BATCH_WAIT_MS:
        raise ValueError(f"batch_wait_ms of {type!r} must be from 0 to {MAX_BATCH_WAIT_MS}, not {batch_wait_ms}")

    def register(target: Target) -> Target:
        known = _registry.get(type)
        if known is not None and known.target is not target:
            raise ValueError(f"job type {type!r} has two handlers: {_name(known.target)} and {_name(target)}")
        if inspect.isclass(target) and not callable(getattr(target, "run", None)):
            raise TypeError(f"{_name(target)} needs a method run(self, ctx, payload)")
        _registry[type] = Registered(type, target, min_memory_mb, pinned, batch, batch_wait_ms)
        return target

    return register


def load(modules: Iterable[str], on_silent: Callable[[str], None]) -> dict[str, Registered]:
    """Import the built-in handlers, those of installed packages, and the operator's modules. Raises NotLoaded.

    A module that registers none is told: somebody forgot the decorator, or named another module than was meant. One
    that others had imported may have registered its own then.
    """
    named = {point.value: f"entry point {point.name} of {ENTRY_POINTS}" for point in entry_points(group=ENTRY_POINTS)}
    for name in (BUILTIN, *named, *modules):
        before = None if name in sys.modules else len(_registry)
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise NotLoaded(f"{named.get(name, 'worker_handlers')} = {name!r}", name, error) from error
        if len(_registry) == before:
            on_silent(f"{named.get(name, 'worker_handlers')} = {name!r} registers no handler")
    return dict(_registry)


def _is_of(missing: str | None, module: str) -> bool:
    """Whether it is the module itself, or a package around it; else it is something that the module wants to import."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _name(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"
