"""The worker: a supervisor that claims jobs, and slots (child processes) that run handlers.

    supervisor process                                     slot processes, one session each
    each pool that it serves:
    ├─ intake      read entries → claim → dispatch ─────────▶ load handler once, run jobs, one or a batch to a call
    ├─ hand        jobs claimed ahead, while they are over within moments
    ├─ slots       hear answers, enforce time limits, respawn ◀── progress, end
    ├─ ledger      claims + leases, starts, ends → one transaction
    ├─ custody     look at the GPU before a leased job and after it: warm model, nothing, or processes to wait for
    ├─ questions   answer handlers: is the job still their own, results of what it needed; keep the tasks they add
    ├─ spawner     make jobs of those once their attempt succeeded
    └─ lifeline    until when jobs may begin and leased ones may run, in memory that every slot reads
    once, for all of them:
    ├─ nursery     a process that forks the slots
    ├─ gpu-watch   ask the GPU driver, so that it holds up nobody else
    ├─ publisher   keep the lanes' windows filled
    ├─ acknowledger  XACK + XDEL of what is settled
    ├─ doorbell    hear that something changed, and make the next heartbeat come now
    └─ keepalive   heartbeats, leases, GPU sample; depends on nothing that a handler can block

A served model is one more process below its slot: a command of the operator's that answers HTTP (`serving`).
A handler's module imports only what is exported here.
"""

from worker.artifacts import Superseded
from worker.context import BatchContext, Context
from worker.handlers import Cancelled, OutOfTime, Permanent, Retry, Skip, handler
from worker.serving import served

__all__ = [
    "BatchContext",
    "Cancelled",
    "Context",
    "OutOfTime",
    "Permanent",
    "Retry",
    "Skip",
    "Superseded",
    "handler",
    "served",
]
