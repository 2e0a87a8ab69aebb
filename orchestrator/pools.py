"""What a pool is: what an operator asks for, the states it passes, and the arrows between them.

    create ▶ starting ──warm──▶ running        drain: starting, running ▶ draining ──stop──▶ stopped
               ▲    ◀──chill──     │           evict: starting, running, draining ▶ evicted
               └── create again ── stopped, evicted

A pool that is idle for longer than `hold_seconds` keeps running with `min_workers` workers, perhaps none: the next job
warms it again. Only a pool that somebody drained or evicted is closed: its jobs wait until it is created again.
Nothing here touches a server; `store.pools.move` takes every arrow from this table.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from orchestrator.jsontext import canonical_json
from orchestrator.names import NewName, TypeName

#: Characters and levels of what operators may note with a pool.
MAX_METADATA, METADATA_DEPTH = 65_536, 16


class PoolState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    EVICTED = "evicted"


#: Those that take jobs.
OPEN = frozenset({PoolState.STARTING, PoolState.RUNNING})
CLOSED = frozenset({PoolState.STOPPED, PoolState.EVICTED})
#: The reason of an open pool that was scaled to zero: it ends by itself, as soon as a job waits.
ASLEEP = "idle; the next job starts it"


@dataclass(frozen=True)
class PoolArrow:
    """One allowed transition; `event` names its audit row."""

    event: str
    source: frozenset[PoolState]
    target: PoolState


CREATE = PoolArrow("pool.created", CLOSED, PoolState.STARTING)
WARM = PoolArrow("pool.warm", frozenset({PoolState.STARTING}), PoolState.RUNNING)
CHILL = PoolArrow("pool.cold", frozenset({PoolState.RUNNING}), PoolState.STARTING)
DRAIN = PoolArrow("pool.draining", OPEN, PoolState.DRAINING)
STOP = PoolArrow("pool.stopped", frozenset({PoolState.DRAINING}), PoolState.STOPPED)
EVICT = PoolArrow("pool.evicted", OPEN | {PoolState.DRAINING}, PoolState.EVICTED)

POOL_ARROWS = (CREATE, WARM, CHILL, DRAIN, STOP, EVICT)

Provider = Literal["local", "external", "kubernetes"]
#: Workers of a pool, and their slots together: the leader finds a place for each, and all else waits meanwhile.
MAX_WORKERS = MAX_POOL_SLOTS = 4096
Workers = Annotated[int, Field(ge=0, le=MAX_WORKERS)]
ModelName = Annotated[str, Field(min_length=1, max_length=255)]
Metadata = dict[str, Any]

#: A change of any of these is another model: workers that have the new one warm up before the old ones leave.
SWAPPED = frozenset({"type", "model_id", "adapter", "variant", "slots", "min_memory_mb", "gpu_count"})


class PoolSpec(BaseModel):
    """A pool as an operator describes it. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    pool_id: NewName | None = None
    agent_name: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    #: The job type whose handler every slot loads before its first job; absent: handlers load when a job needs them.
    type: TypeName | None = None
    model_id: ModelName | None = None
    adapter: ModelName | None = None
    variant: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    desired_workers: Workers = 1
    min_workers: Workers = 0
    max_workers: Workers | None = None
    slots: Annotated[int, Field(ge=1, le=512)] = 1
    min_memory_mb: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    gpu_count: Annotated[int, Field(ge=1, le=64)] = 1
    hold_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = 600
    autosize: bool = False
    provider: Provider = "local"
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_workers > self.desired_workers:
            raise ValueError(
                f"min_workers ({self.min_workers}) must not exceed desired_workers ({self.desired_workers})"
            )
        if self.max_workers is not None and self.max_workers < self.desired_workers:
            wanted, most = self.desired_workers, self.max_workers
            raise ValueError(
                f"desired_workers ({wanted}) must not exceed max_workers ({most}); raise both, or ask for less"
            )
        for name in ("desired_workers", "max_workers"):
            if (getattr(self, name) or 0) * self.slots > MAX_POOL_SLOTS:
                raise ValueError(f"{name} times slots must not exceed {MAX_POOL_SLOTS}")
        if self.provider == "kubernetes" and not (self.metadata or {}).get("deployment"):
            raise ValueError("a pool of the provider kubernetes names its Deployment in metadata.deployment")
        return self

    @field_validator("metadata")
    @classmethod
    def _storable(cls, metadata: Metadata | None) -> Metadata | None:
        if len(metadata_text(metadata) or "") > MAX_METADATA:
            raise ValueError(f"must not be longer than {MAX_METADATA} characters")
        return metadata

    def named(self) -> PoolSpec:
        """With an id, a new one if none was given."""
        return self if self.pool_id else self.model_copy(update={"pool_id": f"pool-{secrets.token_hex(6)}"})

    def changed(self, given: dict[str, Any]) -> PoolSpec:
        """With these fields instead; whole and checked, as a new one would be."""
        return PoolSpec.model_validate(self.model_dump() | given)


class PoolChange(BaseModel):
    """What PATCH may change; whether the whole still makes sense is checked against the row."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    agent_name: str | None = None
    type: TypeName | None = None
    model_id: ModelName | None = None
    adapter: ModelName | None = None
    variant: str | None = None
    desired_workers: Workers | None = None
    min_workers: Workers | None = None
    max_workers: Workers | None = None
    slots: int | None = None
    min_memory_mb: int | None = None
    gpu_count: int | None = None
    hold_seconds: int | None = None
    autosize: bool | None = None
    metadata: Metadata | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set}


def metadata_text(metadata: Metadata | None) -> str | None:
    """As it is stored. Raises InvalidInput for what is no plain, shallow JSON."""
    return None if metadata is None else canonical_json(metadata, "metadata", METADATA_DEPTH)


def read_metadata(text: str | None) -> Metadata | None:
    return json.loads(text) if text else None
