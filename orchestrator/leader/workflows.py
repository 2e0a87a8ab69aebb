"""What the leader does for workflows: time limits, what takes more than one transaction, and tasks that tasks added."""

from __future__ import annotations

from functools import partial

from orchestrator.jobs import RetryPolicy
from orchestrator.leader.apart import Apart, Write
from orchestrator.leader.term import Term
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import flows, leadership, spawning, workflows
from orchestrator.store.database import Database, RowsHeld
from orchestrator.store.policies import Copy
from orchestrator.store.sweeping import Walk
from orchestrator.stream.hub import Hub
from orchestrator.workflows import Limits

#: Workflows that one call sees to, and batches of the tasks of each.
MOST, BATCHES = 50, 200
#: Batches of added tasks that one call makes jobs of: the worker that added them is at it as well.
MAKES = 20
#: Frames of attempts that were lost, deleted by one call.
FRAMES = 500
# Asked before anything begins, as in `duties`.
_CONCERNED = leadership.question(flows.OVERDUE, flows.SWEPT, spawning.MARKED, spawning.STAGED)

#: How far this term is with workflows that have more tasks than one call sees to.
Walks = dict[str, Walk]


def tend(
    term: Term,
    apart: Apart,
    settings: Settings,
    policy: RetryPolicy,
    policies: Copy,
    publisher: Publisher,
    hub: Hub,
    unfinished: Walks,
) -> int:
    """How much it did."""
    if not term.finds(_CONCERNED):
        return 0
    late = term.db.read(lambda conn: flows.overdue(conn, MOST))
    walks = apart.each(late, lambda one, write: write(partial(workflows.expire, workflow_id=one)))
    swept = term.db.read(lambda conn: flows.swept(conn, MOST))
    walks += apart.each(swept, lambda one, write: _sweep(write, one, unfinished))
    if any(walk.asked for walk in walks):
        hub.ring("look")  # workers hear which of their jobs must stop
    hub.dead_letters.take_back([entry for walk in walks for entry in walk.entry_ids])
    lanes = {lane for walk in walks for lane in walk.lanes}
    rules = spawning.Rules(policy, Limits.of(settings), policies.book)
    marked = term.db.read(lambda conn: spawning.marked(conn, MOST))
    made = sum(apart.each(marked, lambda one, write: _make(term.db, write, one, rules, lanes)))
    for lane in sorted(lanes):
        publisher.nudge(lane)
    forgotten = term.write(lambda conn: spawning.forget_lost(conn, FRAMES))
    return max(len(walks), made, forgotten)


def _sweep(write: Write, workflow_id: str, unfinished: Walks) -> Walk:
    """What it did is told also if somebody holds a row of the next batch, and nothing of it is done again."""
    walk: Walk = unfinished.pop(workflow_id, Walk())
    for done in range(BATCHES):
        try:
            walk = write(partial(walk.go_on, workflow_id=workflow_id))
        except RowsHeld:
            if not done:
                unfinished[workflow_id] = walk
                raise
            break
        if walk.after is None:
            return walk
    unfinished[workflow_id] = walk.place
    return walk


def _make(db: Database, write: Write, one: spawning.Marked, rules: spawning.Rules, lanes: set[str]) -> int:
    total = 0
    for _ in range(MAKES):
        made = spawning.make_some(db, one, rules, write)
        total += made.count
        lanes |= made.lanes
        if not made.more:
            break
    return total
