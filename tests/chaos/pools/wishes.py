"""What pools are asked for. Sizes are chosen so that not all of them fit at once: some wait, some make others leave."""

from dataclasses import dataclass
from random import Random
from typing import Any

from orchestrator.pools import PoolChange, PoolSpec
from tests.chaos.pools.handlers import MODEL, PINNED

#: Most workers that one pool is asked to have.
MOST_WORKERS = 3
#: Idle pools shrink after so many seconds, or not within a run.
SHORT_HOLD_S, LONG_HOLD_S = 3, 3600


@dataclass(frozen=True)
class Wish:
    """What stays the same of a pool, however often it is created: the type of its jobs must be known before."""

    pool_id: str
    type: str
    memory_mb: int
    hold_seconds: int

    def spec(self, rng: Random) -> PoolSpec:
        desired = rng.choices(range(MOST_WORKERS + 1), (1, 6, 2, 1))[0]
        return PoolSpec(
            pool_id=self.pool_id,
            type=self.type,
            model_id=f"m{rng.randint(1, 3)}",
            variant=rng.choice(("fp16", "int8")),
            desired_workers=desired,
            min_workers=rng.randint(0, min(desired, 1)),
            slots=rng.choice((1, 1, 1, 1, 2)),
            min_memory_mb=self.memory_mb,
            hold_seconds=self.hold_seconds,
        )

    def modest(self) -> PoolSpec:
        """One worker of each: those fit all together, if idle models leave."""
        return PoolSpec(
            pool_id=self.pool_id, type=self.type, min_memory_mb=self.memory_mb, min_workers=1, hold_seconds=LONG_HOLD_S
        )


def draw(rng: Random, count: int) -> list[Wish]:
    """Every fourth is pinned and small: it leaves for nobody, and all of those must fit."""
    return [_wish(rng, number) for number in range(count)]


def _wish(rng: Random, number: int) -> Wish:
    pinned = number % 4 == 3
    memory = rng.choice((1000, 3000)) if pinned else rng.choice((1000, 4000, 9000))
    hold = SHORT_HOLD_S if number % 5 == 2 else LONG_HOLD_S
    return Wish(f"pool-{number:02d}", PINNED if pinned else MODEL, memory, hold)


def scaled(rng: Random) -> PoolChange:
    return PoolChange(desired_workers=rng.randint(0, MOST_WORKERS), min_workers=0)


def swapped(rng: Random, wish: Wish) -> PoolChange:
    """Another model, another variant, more slots for each worker, or a model of another size."""
    change: dict[str, Any] = rng.choice(
        (
            {"model_id": f"m{rng.randint(4, 99)}"},
            {"variant": rng.choice(("fp16", "int8", "nf4")), "adapter": rng.choice(("lora-1", "lora-2"))},
            {"slots": rng.choice((1, 2))},
            {"min_memory_mb": wish.memory_mb + rng.choice((0, 500, 1000))},
        )
    )
    return PoolChange(**change)
