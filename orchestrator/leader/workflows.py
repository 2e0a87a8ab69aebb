"""What the leader does for workflows: time limits, what takes more than one transaction, and tasks that tasks added."""

from __future__ import annotations

from functools import partial

from orchestrator.jobs import RetryPolicy
from orchestrator.leader.term import Term
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import flows, leadership, spawning, workflows
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
    walks = [term.write(partial(workflows.expire, workflow_id=one)) for one in late]
    walks += [_sweep(term, one, unfinished) for one in term.db.read(lambda conn: flows.swept(conn, MOST))]
    if any(walk.asked for walk in walks):
        hub.ring("look")  # workers hear which of their jobs must stop
    hub.unbury([entry for walk in walks for entry in walk.entry_ids])
    lanes = {lane for walk in walks for lane in walk.lanes}
    made = _make(term, settings, policy, policies, lanes)
    for lane in sorted(lanes):
        publisher.nudge(lane)
    forgotten = term.write(lambda conn: spawning.forget_lost(conn, FRAMES))
    return max(len(walks), made, forgotten)


def _sweep(term: Term, workflow_id: str, unfinished: Walks) -> Walk:
    walk = unfinished.pop(workflow_id, Walk())
    for _ in range(BATCHES):
        walk = term.write(partial(walk.go_on, workflow_id=workflow_id))
        if walk.after is None:
            return walk
    unfinished[workflow_id] = walk.place
    return walk


def _make(term: Term, settings: Settings, policy: RetryPolicy, policies: Copy, lanes: set[str]) -> int:
    rules = spawning.Rules(policy, Limits.of(settings), policies.book)
    total = 0
    for one in term.db.read(lambda conn: spawning.marked(conn, MOST)):
        for _ in range(MAKES):
            made = spawning.make_some(term.db, one, rules, term.write)
            total += made.count
            lanes |= made.lanes
            if not made.more:
                break
    return total
