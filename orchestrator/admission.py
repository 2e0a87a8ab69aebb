"""Whether and how a job comes in: at once, blocked until something lets it go, on the CPU, or not at all.

Decisions about new jobs are made in the transaction that stores them (`store.submit`), for all of a batch together.
What a gate (`gates`) keeps waiting is let go by the leader (`store.gatekeeper`), in order of rank, through the same
functions; so is every job that costs units or wants a quiet hour, because only one place may count what is spent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.errors import InvalidInput, OrchestratorError, Overloaded, Paused
from orchestrator.gates import (
    AGENT,
    AT_SUBMIT,
    CAPACITY,
    FOR_UNITS,
    QUIET,
    STAGES,
    UNTIL_QUIET,
    Asked,
    Closed,
    Standing,
    waits_at,
)
from orchestrator.policies import Book, keys_of, resume_command


@dataclass(frozen=True)
class Admitted:
    """`blocked_on` names what it waits for before anybody looks at it (`store.blocked`), `reason` says so to people."""

    blocked_on: str | None = None
    reason: str | None = None
    #: It runs without a GPU, although it asked for one: its submitter allowed that, and there is none to be had.
    on_cpu: bool = False


Decision = Admitted | OrchestratorError
FREELY = Admitted()


def decide(asked: Asked, standing: Standing) -> Decision:
    """About a new job. Refusals come before waits, and of several waits the first gate's."""
    if refused := _paused(asked, standing.book) or _impossible(asked, standing.book):
        return refused
    on_cpu, wait = False, None
    for gate, _ in STAGES[:AT_SUBMIT]:
        closed = gate(asked, standing)
        if closed is None:
            continue
        if closed.action == "cpu" and asked.cpu_fallback:
            on_cpu, asked = True, replace(asked, needs_memory=False)
        elif closed.action == "queue":
            wait = wait or closed
        else:
            return closed.refusal
    wait = wait or _leaders(asked, standing)
    decision = Admitted(wait.key if wait else None, wait.reason[:255] if wait else None, on_cpu=on_cpu)
    standing.agent(asked.agent).jobs += is_counted(decision)
    standing.lane(asked.lane).count += wait is None and not asked.later
    return decision


def go_on(asked: Asked, standing: Standing, left: str) -> Closed | None:
    """What a job that waited for `left` waits for now; None: nothing, and it is counted."""
    stage = next(n for n, (_, keys) in enumerate(STAGES) if any(waits_at(left, key) for key in keys))
    closed = next((found for gate, _ in STAGES[stage:] if (found := gate(asked, standing))), None)
    if waits_at(left, AGENT) and (closed is None or closed.key != left):
        standing.agent(asked.agent).jobs += 1
    if closed is None:
        standing.lane(asked.lane).count += 1
        standing.used_units += asked.cost_units if standing.book.admission.capacity else 0.0
    return closed


def is_counted(decision: Decision) -> bool:
    """Whether the job is one that its agent has in flight."""
    return isinstance(decision, Admitted) and not waits_at(decision.blocked_on or "", AGENT)


def label(decision: Decision) -> tuple[str, str]:
    """How it is counted: what was decided, and why in a word of a small set."""
    if isinstance(decision, OrchestratorError):
        return "rejected", decision.code
    if decision.blocked_on is not None:
        return "queued", decision.blocked_on.partition(":")[0]
    return ("cpu", "no_gpu") if decision.on_cpu else ("admitted", "free")


def _paused(asked: Asked, book: Book) -> Paused | None:
    """Why a paused scope refuses it. One that keeps submits lets it in: as a cap of nothing it starts nothing."""
    if not book.pauses:
        return None
    for key in keys_of(asked.lane, asked.agent, asked.type, asked.model_id):
        pause = book.pauses.get(key)
        if pause is not None and pause.action == "reject":
            return Paused(key, pause.reason, f"`{resume_command(key)}`")
    return None


def _leaders(asked: Asked, standing: Standing) -> Closed | None:
    """A new job that costs units or wants quiet waits for the leader, whatever he will say in a moment."""
    if asked.later:
        return None
    if asked.quiet:
        return Closed("queue", QUIET, Overloaded(UNTIL_QUIET))
    if asked.cost_units and standing.book.admission.capacity:
        return Closed("queue", CAPACITY, Overloaded(FOR_UNITS))
    return None


def _impossible(asked: Asked, book: Book) -> InvalidInput | None:
    most = book.admission.capacity.most if book.admission.capacity else None
    if most is None or asked.cost_units <= most:
        return None
    return InvalidInput(f"cost_units: {asked.cost_units:g} is more than the capacity ever is, {most:g}", "cost_units")
