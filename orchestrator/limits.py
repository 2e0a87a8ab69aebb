"""How much runs at the same time, and how much may wait for it: decided in one place, from what is given.

Four lanes, so that work of one kind is not held up by work of another: `io` (requests, files), `cpu`, `embedding`
(calls of a model) and `proc` (child processes). Who fans out takes one of them and counts for itself no more.

`threads` is the first of: the flag, the configuration, the environment, the number of CPUs. 0 means "not given" in each
of them; what is below is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from orchestrator.errors import ConfigError

#: Requests at the same time, whatever is asked for.
IO_PLATFORM_CAP = 64
#: Connections or threads behind the requests where nobody says, and how many requests keep each of them busy.
POOL_SIZE, PER_CONNECTION = 4, 4
#: Requests at the same time in a machine with less memory than that.
IO_MEMORY_CAPS = ((16 * 2**30, 16), (32 * 2**30, 32))
#: Child processes at the same time.
PROC_DEFAULT, PROC_CAP = 4, 8
#: Items in the house for each that runs; and at least, by lane.
PENDING_PER_RUN, IO_PENDING_MIN, PENDING_MIN = 4, 8, 16

#: Variables for programs that have no settings: the command line and the client.
THREADS_VARIABLE, OVERSUBSCRIBE_VARIABLE = "GPUORCH_THREADS", "GPUORCH_IO_OVERSUBSCRIBE"


@dataclass(frozen=True)
class Lane:
    """`pending` counts what runs, what waits to, and what is done and not yet taken."""

    concurrency: int
    pending: int

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.pending < 1:
            raise ConfigError(f"{self}: a lane that lets nothing through would wait for ever")


@dataclass(frozen=True)
class Machine:
    cpus: int
    memory_bytes: int

    @classmethod
    def here(cls) -> Machine:
        return cls(len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@dataclass(frozen=True)
class Limits:
    threads: int
    #: Whole items (a file, a batch of an import) at the same time.
    items: int
    io: Lane
    cpu: Lane
    embedding: Lane
    proc: Lane

    @classmethod
    def resolve(
        cls,
        machine: Machine,
        *,
        cli: int | None = None,
        config: int | None = None,
        env: int | None = None,
        cap: int = IO_PLATFORM_CAP,
        embedding: int | None = None,
        pool_size: int = POOL_SIZE,
        io_oversubscribe: bool = False,
    ) -> Limits:
        """`cap` bounds what runs at the same time in any lane; `pool_size` is what stands behind the requests.

        `io_oversubscribe` lifts what pool and memory bound, up to `cap` for items and 64 for requests.
        Raises ConfigError for a negative number.
        """
        threads = (
            _given("the flag --threads", cli)
            or _given("threads in the configuration", config)
            or _given(THREADS_VARIABLE, env)
            or machine.cpus
        )
        cap = _given("cap", cap) or IO_PLATFORM_CAP
        items = _between(1, threads, cap)
        io = min(IO_PLATFORM_CAP, items)
        if not io_oversubscribe:
            default_cap = io_default_cap(machine, _given("pool_size", pool_size) or POOL_SIZE)
            items, io = min(items, default_cap), min(io, default_cap)
        proc = _between(1, min(PROC_DEFAULT, machine.cpus), PROC_CAP)
        model = _between(1, _given("embedding", embedding) or threads, cap)
        return cls(
            threads=threads,
            items=items,
            io=Lane(io, max(IO_PENDING_MIN, io * PENDING_PER_RUN)),
            cpu=Lane(items, max(PENDING_MIN, items * PENDING_PER_RUN)),
            embedding=Lane(model, max(PENDING_MIN, model * PENDING_PER_RUN)),
            proc=Lane(proc, proc * PENDING_PER_RUN),
        )


def io_default_cap(machine: Machine, pool_size: int) -> int:
    memory_cap = next((cap for below, cap in IO_MEMORY_CAPS if machine.memory_bytes < below), IO_PLATFORM_CAP)
    return min(IO_PLATFORM_CAP, max(1, pool_size * PER_CONNECTION), memory_cap)


def of_this_process(cli: int | None = None, *, config: int | None = None, pool_size: int = POOL_SIZE) -> Limits:
    """Those of a program without settings, by its flag, its environment and the machine it runs on."""
    return Limits.resolve(
        Machine.here(),
        cli=cli,
        config=config,
        env=_number(THREADS_VARIABLE),
        pool_size=pool_size,
        io_oversubscribe=_switch(OVERSUBSCRIBE_VARIABLE),
    )


def _given(name: str, value: int | None) -> int | None:
    """None for 0 too: it means "not given"."""
    if value is not None and value < 0:
        raise ConfigError(f"{name} = {value}: must not be negative; 0 means the default")
    return value or None


def _between(low: int, value: int, high: int) -> int:
    return max(low, min(value, high))


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else None
    except ValueError:
        raise ConfigError(f"{name} = {text!r}: must be a whole number; 0 means the default") from None


def _switch(name: str) -> bool:
    text = os.environ.get(name, "").lower()
    if text not in {"", "0", "1", "false", "true"}:
        raise ConfigError(f"{name} = {text!r}: must be true or false")
    return text in {"1", "true"}
