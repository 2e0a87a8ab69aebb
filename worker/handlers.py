"""Handlers are registered by the worker's operator; a job's `type` only selects one. Nothing in a job is imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

#: Entry point group under which installed packages offer handler modules.
ENTRY_POINTS = "gpuorch.handlers"
BUILTIN = "worker.builtin"

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


@dataclass(frozen=True)
class Registered:
    type: str
    target: Callable[..., Any]
    min_memory_mb: int
    #: Its model, once warm, leaves the GPU for nobody.
    pinned: bool = False

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.target)


_registry: dict[str, Registered] = {}


def handler(type: str, *, min_memory_mb: int = 0, pinned: bool = False) -> Callable[[Target], Target]:
    """Register a function `(ctx, payload) -> result`, or a class with `run` (and `load`, `unload`), for a job type.

    A class that holds GPU memory after a job stays warm: the next job of its type finds it loaded. It leaves when
    others need the room, unless it is `pinned`. One with a method `healthy` is asked before each job and after each
    that failed: False means unloaded, and loaded anew for the next.
    """

    def register(target: Target) -> Target:
        known = _registry.get(type)
        if known is not None and known.target is not target:
            raise ValueError(f"job type {type!r} has two handlers: {_name(known.target)} and {_name(target)}")
        if inspect.isclass(target) and not callable(getattr(target, "run", None)):
            raise TypeError(f"{_name(target)} needs a method run(self, ctx, payload)")
        _registry[type] = Registered(type, target, min_memory_mb, pinned)
        return target

    return register


def load(modules: Iterable[str]) -> dict[str, Registered]:
    """Import the built-in handlers, those of installed packages, and the operator's modules."""
    for name in (BUILTIN, *(point.value for point in entry_points(group=ENTRY_POINTS)), *modules):
        importlib.import_module(name)
    return dict(_registry)


def _name(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"
