"""The models that a slot keeps: instances of handler classes, loaded once and used by job after job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from worker.context import BatchContext, Context
from worker.handlers import Registered

Key = tuple[str, str | None]


class Models:
    def __init__(self, registry: dict[str, Registered]) -> None:
        self._registry = registry
        #: By type and model, and the device that each was loaded for.
        self._warm: dict[Key, tuple[Any, str | None]] = {}
        #: Seconds that loading took since somebody set this to 0.
        self.load_s = 0.0

    def __contains__(self, key: Key) -> bool:
        return key in self._warm

    def handler(self, ctx: Context | BatchContext) -> Callable[[Any, Any], Any]:
        """What runs this job: its function, or the method of its class, whose model is loaded if it is not."""
        registered = self._registry[ctx.type]
        if not registered.is_class:
            return registered.target
        model = (ctx.type, ctx.model_id)
        if model in self._warm and self._warm[model][1] != ctx.device:
            self._unload(model)
        self.dismiss_broken(ctx)
        if model not in self._warm:
            self._warm[model] = self._loaded(registered, ctx), ctx.device
        run: Callable[[Any, Any], Any] = self._warm[model][0].run
        return run

    def dismiss_broken(self, ctx: Context | BatchContext) -> None:
        """A model that says that it is not there any more is not kept, and loaded anew for the next job."""
        model = (ctx.type, ctx.model_id)
        healthy = getattr(self._warm[model][0], "healthy", None) if model in self._warm else None
        if healthy is not None and not _well(healthy()):
            self._unload(model)

    def unload_all(self) -> None:
        for model in list(self._warm):
            self._unload(model)

    def _loaded(self, registered: Registered, ctx: Context | BatchContext) -> Any:
        started = time.monotonic()
        instance = registered.target()
        if hasattr(instance, "load"):
            instance.load(ctx)
        self.load_s += time.monotonic() - started
        return instance

    def _unload(self, model: Key) -> None:
        instance, _ = self._warm.pop(model)
        if hasattr(instance, "unload"):
            instance.unload()


def _well(said: object) -> bool:
    """Who says nothing has no complaint: a method without a `return` must not load the model for each job."""
    return said is None or bool(said)
