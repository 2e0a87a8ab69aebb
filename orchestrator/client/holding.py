"""`lease(…)`: GPU memory for as long as a block runs."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypedDict, TypeVar, Unpack

from orchestrator.client import interrupt
from orchestrator.client.aio import AsyncApi
from orchestrator.client.api import Api
from orchestrator.client.asking import Asking, Grant, Wanted, this_node, this_user
from orchestrator.client.errors import LeaseLost
from orchestrator.client.interrupt import InTask, Interrupt
from orchestrator.client.keeper import Keeper
from orchestrator.client.paths import default_url
from orchestrator.client.steps import Operation
from orchestrator.client.visible import visible
from orchestrator.client.wire import Contact

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Held:
    """A lease that is held. It belongs to the process and the thread that took it."""

    def __init__(
        self, grant: Grant, api: Api, on_lost: Callable[[Held], None] | None, how: Interrupt | None = None
    ) -> None:
        """`how` its holder is interrupted: by default as suits the thread."""
        self.mode = grant.mode
        self.node_id = grant.node_id
        self.gpu_uuids = grant.gpu_uuids
        self.gpu_indexes = grant.gpu_indexes
        #: Set when the lease is lost, for loops that would rather look than be interrupted.
        self.lost = threading.Event()
        self.reason: str | None = None
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._interrupt = None if on_lost is not None else how or interrupt.of_this_thread()
        self._keeper = Keeper(api, grant, self._lose)
        visible.show(self, grant.gpu_uuids)

    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "held"
        return f"<{self.mode} lease, {state}: {','.join(self.gpu_uuids) or 'no GPU'} on {self.node_id}>"

    def check(self) -> None:
        """Raise LeaseLost if it is lost."""
        if self.lost.is_set():
            raise LeaseLost(self.reason or "")

    def start(self) -> None:
        self._keeper.start()

    def leave(self) -> None:
        """Raise no more, give the GPU back, forget which it was. Again is fine."""
        if os.getpid() != self._pid:
            return  # a forked child: the lease is its parent's, and so are the threads that keep it
        if self._interrupt is not None:
            self._interrupt.close()
        visible.hide(self)
        self._keeper.stop()

    def _lose(self, reason: str) -> None:
        self.reason = reason
        log.warning("the GPU lease is lost: %s", reason)
        if self._interrupt is not None:
            # Before the event is set: whoever sees that must not raise a second time.
            self._interrupt.send(reason)
        self.lost.set()
        if self._on_lost is not None:
            try:
                self._on_lost(self)
            except Exception:
                log.exception("on_lost of a GPU lease failed")
        if self._interrupt is not None:
            self._interrupt.insist()  # last: the holder may be deaf for long


class Leasing:
    """What `lease` returns: a context manager of both kinds, and a decorator that takes a lease for each call."""

    def __init__(
        self,
        wanted: Wanted,
        url: str,
        wait_s: float | None,
        on_lost: Callable[[Held], None] | None,
        on_wait: Callable[[str], None] | None,
    ) -> None:
        self._wanted, self._url, self._wait_s = wanted, url, wait_s
        self._on_lost, self._on_wait = on_lost, on_wait
        self._held: Held | None = None
        self._in_task: InTask | None = None

    def __enter__(self) -> Held:
        self._check_free()
        api = Api(self._url)
        try:
            grant = api.run(self._asking(api.contact))
        except BaseException:
            api.close()
            raise
        return self._hold(grant, api)

    async def __aenter__(self) -> Held:
        self._check_free()
        async with AsyncApi(self._url) as api:
            grant = await api.run(self._asking(api.contact))
        self._in_task = InTask()
        return self._hold(grant, Api(self._url))

    def _check_free(self) -> None:
        if self._held is not None:
            raise RuntimeError("this lease is taken already; call lease(…) again for another one")

    def _asking(self, contact: Contact) -> Operation[Grant]:
        return Asking(contact, self._wanted, self._wait_s, self._on_wait).wait()

    def _hold(self, grant: Grant, api: Api) -> Held:
        try:
            held = Held(grant, api, self._on_lost, self._in_task)
        except BaseException:
            api.close()
            raise
        try:
            held.start()
        except BaseException:
            held.leave()
            raise
        self._held = held
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = self._held
        assert held is not None
        try:
            held.leave()
        except LeaseLost:  # that of another lease, around this one, came just now
            held.leave()
            raise
        finally:
            self._held = None
        # Whatever the block did with the error: it did not run under a lease to its end, and must not seem so.
        if error is None and self._on_lost is None:
            held.check()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, in_task = self._held, self._in_task
        assert held is not None
        assert in_task is not None
        in_task.close()
        self._held = self._in_task = None
        # Releasing waits for an answer, in a thread; whoever cancels us meanwhile waits for that, too.
        leaving = asyncio.get_running_loop().run_in_executor(None, held.leave)
        cancelled = await _to_its_end(leaving)
        if in_task.arrived() and (cancelled or isinstance(error, asyncio.CancelledError)):
            raise LeaseLost(held.reason or "")  # whose event may not be set yet
        if cancelled:
            raise asyncio.CancelledError
        if error is None and self._on_lost is None:
            held.check()

    def __del__(self) -> None:
        """The error may come between the last step of the block and the first of `__exit__`, which then never runs."""
        if self._held is not None and self._held.lost.is_set():
            self._held.leave()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):
            raise TypeError("a lease decorates plain functions; use `async with lease(…)` inside of the coroutine")

        @functools.wraps(function)
        def leased(*args: P.args, **kwargs: P.kwargs) -> R:
            with Leasing(self._wanted, self._url, self._wait_s, self._on_lost, self._on_wait):
                return function(*args, **kwargs)

        return leased


async def _to_its_end(work: asyncio.Future[None]) -> bool:
    """Whether somebody wanted to cancel us meanwhile."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled = True
    work.result()
    return cancelled


class LeaseOptions(TypedDict, total=False):
    """See `lease`."""

    agent: str | None
    ttl_seconds: float
    gpu_count: int
    cpu_fallback: bool
    node_id: str | None
    wait_s: float | None
    on_lost: Callable[[Held], None] | None
    on_wait: Callable[[str], None] | None


def lease(min_memory_mb: int, *, url: str | None = None, **options: Unpack[LeaseOptions]) -> Leasing:
    """GPU memory for a block of code (`with`, or `async with`), or for each call of a function that it decorates.

    Take it before the first call of CUDA: inside, CUDA_VISIBLE_DEVICES names the leased GPUs (nothing, for a lease of
    the CPU), for this process and those it starts. It is renewed by itself and released at the end of the block.

    agent, node_id, url: who asks (default: the user), for which machine (the setting node_id, or the name of this
    host: a lease is of use only where the process runs), which server (GPUORCH_URL, or the local one).
    gpu_count, cpu_fallback: on how many GPUs (1), or on the CPU if there is no room.
    ttl_seconds: how long the memory stays taken when this process dies (60).
    wait_s: how long to wait for room; None, the default, waits for as long as it takes, 0 asks once. `on_wait` is told
    the reason whenever it changes.
    on_lost: called instead of raising, from a thread of the client's own.

    When the lease is lost (ended by the server, or not renewed in time because the server is away) LeaseLost is raised
    in the thread or task that took it, shortly before others may be given the memory; see
    `orchestrator.client.interrupt` for what cannot be interrupted. The other threads and child processes of the block
    are the holder's to stop.

    A forked child works under its parent's lease: the threads that keep it do not exist there, nothing is raised, and
    leaving the block releases nothing. Let the parent end its children when it loses the lease.

    Raises LeaseDenied, ServerUnreachable, Refused when the request is wrong, or ConfigError when settings are.
    """
    wanted = Wanted(
        min_memory_mb=min_memory_mb,
        agent=options.get("agent") or this_user(),
        ttl_seconds=options.get("ttl_seconds", 60.0),
        gpu_count=options.get("gpu_count", 1),
        cpu_fallback=options.get("cpu_fallback", False),
        node_id=options.get("node_id") or this_node(),
    )
    waits = options.get("wait_s"), options.get("on_lost"), options.get("on_wait")
    return Leasing(wanted, url or default_url(), *waits)
