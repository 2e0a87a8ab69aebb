"""What a decision about warm workers sees, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

from orchestrator.placement import Ask, Placed


class State(StrEnum):
    """What a worker of a pool is doing."""

    LOADING = "loading"
    IDLE = "idle"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool's limits, and what is asked of it at this moment."""

    pool_id: str
    #: What one worker needs: `min_memory_mb` on each of `gpu_count` GPUs.
    ask: Ask
    min_workers: int = 0
    max_workers: int = 1
    #: Seconds for which a worker beyond the minimum stays idle before it leaves an otherwise happy cluster.
    hold_s: float = inf
    #: Its workers leave for nobody.
    pinned: bool = False
    #: It is draining, stopped or evicted: it wants no workers, and its minimum counts no longer.
    drained: bool = False
    #: Jobs of its lane that could run now and that no worker has, and how long the oldest could have.
    waiting: int = 0
    oldest_wait_s: float = 0.0
    #: Jobs that arrived per second lately (`seen.Rate`).
    arrivals_per_s: float = 0.0
    #: Moving averages of what was observed (`seen.Average`): seconds per job, and to load the model.
    run_s: float = 10.0
    load_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A slot with a pool's model in memory, or on its way there."""

    key: str
    pool_id: str
    gpu_uuids: tuple[str, ...]
    #: On each of its GPUs.
    memory_mb: int
    state: State = State.IDLE
    #: Seconds since its last job ended, or since it was loaded; 0 unless idle.
    idle_s: float = 0.0
    #: Seconds since it was loaded; 0 while it loads.
    resident_s: float = 0.0
    #: It was told to leave: it takes no more jobs, and its memory will be free soon.
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Terms:
    #: Seconds for which a loaded model stays whatever others need (setting `resident_min_s`).
    resident_min_s: float = 30.0
    #: Seconds before which no waiting job has a model with work of its own sent away; how long it takes: see `worth`.
    patience_s: float = 60.0


class Start(NamedTuple):
    pool_id: str
    #: Where there is room for it at this moment. A proposal: the grant decides.
    placed: Placed
    reason: str


class Leave(NamedTuple):
    key: str
    pool_id: str
    #: True: it does nothing and leaves now. False: it takes no further job, and leaves when its present one is over.
    idle: bool
    #: The pool that gets the room; None when nobody needs it.
    room_for: str | None
    reason: str


class Size(NamedTuple):
    """How many workers a pool should have now, those that leave not counted."""

    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    #: By pool.
    sizes: dict[str, Size]
    #: In this order.
    starts: tuple[Start, ...]
    leaves: tuple[Leave, ...]
