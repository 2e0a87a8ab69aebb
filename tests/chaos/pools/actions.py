"""What an operator and fate do to pools and nodes: a table of actions, drawn from a seed.

Operators use the functions of the store; half of the time they also ask the leader to look at once, as the API does,
and half of the time everybody has to find out by themselves.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random

from sqlalchemy import Connection

from orchestrator.errors import OrchestratorError
from orchestrator.pools import CLOSED, OPEN
from orchestrator.store import crews, gpus, pools
from tests.chaos.pools import wishes
from tests.chaos.pools.stage import Stage
from tests.chaos.pools.wishes import Wish

#: Seconds that running jobs get in a drain: hardly any, or enough for most.
DRAIN_S = (0.3, 4.0)


@dataclass
class Scene:
    """What an action works with."""

    stage: Stage
    wishes: Sequence[Wish]
    rng: Random
    done: Counter[str] = field(default_factory=Counter)
    #: Those that came to nothing: another was quicker.
    failed: Counter[str] = field(default_factory=Counter)

    def states(self) -> dict[str, str]:
        return {row["pool_id"]: row["status"] for row in self.stage.db.read(pools.list_pools)}

    def some(self, states: frozenset[str] | None) -> Wish | None:
        """A pool in one of these states; None asks for one that does not exist."""
        now = self.states()
        fit = [wish for wish in self.wishes if (now.get(wish.pool_id) in states if states else wish.pool_id not in now)]
        return self.rng.choice(fit) if fit else None

    def write(self, work: Callable[[Connection], object]) -> None:
        self.stage.db.write(work)

    def perform(self, action: "Action") -> None:
        try:
            told = action.act(self)
        except OrchestratorError as refused:
            told = None
            self.stage.recorder.happen(f"{action.name}: refused: {refused}")
        self.stage.touch()
        (self.failed if told is None else self.done)[action.name] += 1
        if told is not None:
            self.stage.recorder.happen(f"{action.name}: {told}")
        if told is not None and self.rng.random() < 0.5:
            with suppress(OrchestratorError):
                self.stage.hub.ask_for_pools("storm")


#: What was done, to be read by a person; None when there was nothing to do it to.
Act = Callable[[Scene], str | None]


@dataclass(frozen=True)
class Action:
    name: str
    weight: int
    act: Act


ACTIONS: list[Action] = []


def action(weight: int) -> Callable[[Act], Act]:
    def register(act: Act) -> Act:
        ACTIONS.append(Action(act.__name__, weight, act))
        return act

    return register


# ── pools ───────────────────────────────────────────────────────────────────────────────────────────────────────


@action(8)
def create(scene: Scene) -> str | None:
    wish = scene.some(None) or scene.some(CLOSED)
    if wish is None:
        return None
    spec = wish.spec(scene.rng)
    scene.write(lambda conn: pools.create(conn, spec))
    return f"{wish.pool_id} with {spec.desired_workers} workers of {spec.slots} slots"


@action(8)
def scale(scene: Scene) -> str | None:
    wish = scene.some(OPEN)
    if wish is None:
        return None
    change = wishes.scaled(scene.rng)
    scene.write(lambda conn: pools.change(conn, wish.pool_id, change))
    return f"{wish.pool_id} to {change.desired_workers}"


@action(5)
def swap(scene: Scene) -> str | None:
    wish = scene.some(OPEN)
    if wish is None:
        return None
    change = wishes.swapped(scene.rng, wish)
    scene.write(lambda conn: pools.change(conn, wish.pool_id, change))
    return f"{wish.pool_id} to {change.given}"


@action(5)
def drain(scene: Scene) -> str | None:
    wish = scene.some(OPEN)
    if wish is None:
        return None
    timeout_s = scene.rng.choice(DRAIN_S)
    scene.write(lambda conn: pools.drain(conn, wish.pool_id, timeout_s))
    return f"{wish.pool_id} within {timeout_s} s"


@action(4)
def evict(scene: Scene) -> str | None:
    wish = scene.some(OPEN)
    if wish is None:
        return None
    scene.write(lambda conn: pools.evict(conn, wish.pool_id))
    return wish.pool_id


@action(3)
def delete(scene: Scene) -> str | None:
    wish = scene.some(CLOSED)
    if wish is None:
        return None
    scene.write(lambda conn: pools.forget(conn, wish.pool_id))
    return wish.pool_id


# ── nodes and processes ─────────────────────────────────────────────────────────────────────────────────────────


@action(2)
def drain_node(scene: Scene) -> str | None:
    node = scene.rng.choice(sorted(scene.stage.nodes))
    timeout_s = scene.rng.choice(DRAIN_S)
    scene.write(lambda conn: crews.drain_nodes(conn, [node], timeout_s))
    return f"{node} within {timeout_s} s"


@action(3)
def resume_node(scene: Scene) -> str | None:
    node = scene.rng.choice(sorted(scene.stage.nodes))
    scene.write(lambda conn: crews.resume_nodes(conn, [node]))
    return node


@action(3)
def kill_node(scene: Scene) -> str | None:
    """It comes back soon, or stays away until somebody brings it back."""
    stage, alive = scene.stage, sorted(scene.stage.supervisors().values())
    if len(alive) < 2:
        return None
    site = stage.nodes[scene.rng.choice(alive)]
    stage.kill(site)
    back_s = scene.rng.choice((None, 0.0, 2.0, 8.0))
    if back_s is not None:
        stage.later(back_s, lambda: stage.revive(site))
    return f"{site.name}, back in {back_s} s"


@action(3)
def bring_node_back(scene: Scene) -> str | None:
    dead = [site for site in scene.stage.nodes.values() if not site.alive]
    if not dead:
        return None
    site = scene.rng.choice(dead)
    scene.stage.revive(site)
    return site.name


@action(2)
def freeze_node(scene: Scene) -> str | None:
    """For a moment, or for longer than its timeout: then it wakes up without knowing that it was given up."""
    alive = sorted(scene.stage.supervisors().values())
    if not alive:
        return None
    site, seconds = scene.stage.nodes[scene.rng.choice(alive)], scene.rng.choice((1.0, 10.0))
    scene.stage.freeze(site, seconds)
    return f"{site.name} for {seconds} s"


@action(2)
def kill_leader(scene: Scene) -> str | None:
    stage = scene.stage
    site = stage.leader()
    if site is None or not site.alive:
        return None
    site.send(signal.SIGKILL)
    site.member.process.wait(10)
    stage.later(scene.rng.choice((0.0, 3.0)), lambda: stage.revive(site))
    return site.name


@action(4)
def kill_slot(scene: Scene) -> str | None:
    slots = sorted(scene.stage.slots())
    if not slots:
        return None
    slot = scene.rng.choice(slots)
    scene.stage.hurt_workers.add(slot.worker_id)
    with suppress(ProcessLookupError):
        os.kill(slot.pid, signal.SIGKILL)
    return slot.mark


@action(1)
def flush_redis(scene: Scene) -> str | None:
    scene.stage.redis.flush()
    return "everything"


# ── the end of a storm ──────────────────────────────────────────────────────────────────────────────────────────


def bring_everything_back(scene: Scene) -> None:
    """All nodes live and take jobs."""
    for site in scene.stage.nodes.values():
        scene.stage.revive(site)
    scene.write(lambda conn: crews.resume_nodes(conn, None))
    clear_quarantines(scene)
    scene.stage.touch()


def clear_quarantines(scene: Scene) -> list[str]:
    closed = scene.stage.query("SELECT gpu_uuid, quarantine_reason FROM gpus WHERE quarantined_at IS NOT NULL")
    for uuid, _ in closed:
        scene.write(partial(gpus.clear, uuid=uuid))
    return [f"{uuid}: {reason}" for uuid, reason in closed]


def close_all(scene: Scene) -> None:
    for pool_id, state in scene.states().items():
        if state not in CLOSED:
            scene.write(partial(pools.evict, pool_id=pool_id))
    scene.stage.touch()


def open_modestly(scene: Scene) -> None:
    """Every pool that ever was, with one worker: whatever waits can run."""
    for wish in scene.wishes:
        scene.write(partial(pools.create, spec=wish.modest()))
    scene.stage.touch()
