"""What a session serves: a lane, with so many slots, and the model that they keep warm."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.store.crews import Order


class Model(NamedTuple):
    """What every slot loads before its first job, and under how large a lease; None: as its handler says."""

    type: str
    model_id: str | None = None
    memory_mb: int | None = None
    gpu_count: int = 1


class Post(NamedTuple):
    pool_id: str
    slots: int
    revision: int = 0
    model_id: str | None = None
    adapter: str | None = None
    variant: str | None = None
    model: Model | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.pool_id, self.revision

    @classmethod
    def of(cls, order: Order, slots: int) -> Post:
        model = Model(order.type, order.model_id, order.memory_mb, order.gpu_count) if order.type else None
        return cls(order.pool_id, slots, order.revision, order.model_id, order.adapter, order.variant, model)
