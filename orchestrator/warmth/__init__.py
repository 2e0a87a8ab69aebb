"""How many warm workers each pool should have now, and which idle models leave for which waiting ones.

Pure: a leader's duty reads the facts, calls `decide`, and writes down what it says; a second later it does so again.
Nothing is remembered between two calls except what the facts say, so a decision that was lost is made again.

    decision = decide(pools, workers, cluster, terms)

`pools`: every pool that has a lane, also drained ones that still have workers. Limits are columns of the pool.
`waiting` and `oldest_wait_s` count the jobs of its lane that could run now (ready or announced, not claimed; the wait
begins when a job could first run). `arrivals_per_s`, `run_s` and `load_s` are moving averages (`Rate`, `Average`) of
jobs accepted, run times of ended jobs, and times from the start of a worker to its readiness.

`workers`: every slot that holds memory for a pool, also one that loads or was told to leave (`leaving`), from leases
and slots. One that is starting but has no lease yet counts as loading, without GPUs.

`cluster`: the free room (`placement.Cluster`), in which all leases count as taken. It is used up.

The answer, each part with a reason for operators:
`sizes`: how many workers a pool should have, those counted that start, or will start in room that is being made.
`starts`: in this order; the lease decides whether there was room.
`leaves`: idle workers that leave now, and busy ones that leave when their job is over; no job is ever interrupted. Both
must be refused further jobs in the same transaction (as `evicted_at` does), else one of them takes a job between the
decision and its end. Tell them once: from then on they are `leaving`, their room counts as coming, and nobody else is
sent away for the same need.

How it decides: `decide` (the steps), `staff` (what pools lack and can spare), `worth` (whether a swap pays).
"""

from orchestrator.warmth.decide import decide
from orchestrator.warmth.seen import Average, Rate
from orchestrator.warmth.views import Decision, Leave, Pool, Size, Start, State, Terms, Worker

__all__ = ["Average", "Decision", "Leave", "Pool", "Rate", "Size", "Start", "State", "Terms", "Worker", "decide"]
