"""The kinds of jobs of a chaos run: what is submitted, and how such a job may end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

Body = dict[str, Any]

#: By key, how many of the jobs that have it run at once.
CAPS = {"host:*": 2}


@dataclass(frozen=True)
class Kind:
    """`ends` are its ends when all is well; any job may also be dead-lettered after too many crashes."""

    name: str
    weight: float
    ends: frozenset[str]
    body: Callable[[Random], Body]


@dataclass(frozen=True)
class Submitted:
    """A job that was accepted."""

    job_id: str
    kind: str
    ends: frozenset[str]
    #: Epoch seconds before which it must not start.
    not_before: float | None = None


def _work(**payload: Any) -> Body:
    return {"type": "chaos.work", "payload": payload}


def _leased(rng: Random) -> Body:
    memory = rng.choice((500, 2000, 6000, 11_000))
    payload = {"memory_mb": memory // 2, "seconds": rng.uniform(0.02, 0.4)}
    return {"type": "chaos.allocate", "payload": payload, "min_memory_mb": memory}


def _capped(rng: Random) -> Body:
    """Waits for others of its host."""
    return _work(seconds=rng.uniform(0.0, 0.1)) | {"concurrency_keys": [f"host:{rng.randrange(3)}"]}


def _delayed(rng: Random) -> Body:
    return _work() | {"earliest_start_at": _in(rng.uniform(0.5, 6.0))}


def _urgent(rng: Random) -> Body:
    """Fails when its deadline passes in the queue."""
    return _work() | {"deadline_at": _in(rng.uniform(0.5, 10.0))}


def _in(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


_DONE, _FAILED, _SKIPPED, _DEAD = (frozenset({end}) for end in ("done", "failed", "skipped", "dead_letter"))

KINDS = (
    Kind("quick", 60, _DONE, lambda rng: _work()),
    Kind("slow", 16, _DONE, lambda rng: _work(seconds=rng.uniform(0.1, 1.8))),
    Kind("long", 1.2, _DONE, lambda rng: _work(seconds=rng.uniform(3.0, 6.0))),
    Kind("leased", 10, _DONE, _leased),
    Kind("capped", 6, _DONE, _capped),
    Kind("flaky", 6, _DONE, lambda rng: _work(fails="transient", times=rng.randint(1, 3))),
    Kind("again", 4, _DONE, lambda rng: _work(fails="retry", after=rng.uniform(0.0, 1.5), times=rng.randint(1, 2))),
    Kind("delayed", 4, _DONE, _delayed),
    Kind("urgent", 2, _DONE | _FAILED, _urgent),
    Kind("permanent", 2, _FAILED, lambda rng: _work(fails="permanent", times=99)),
    Kind("skip", 2, _SKIPPED, lambda rng: _work(fails="skip", times=99)),
    Kind("crash-once", 1, _DONE, lambda rng: _work(fails="crash", times=1)),
    Kind("crash", 0.5, _DEAD, lambda rng: _work(fails="crash", times=99)),
    Kind("hopeless", 1, _DEAD, lambda rng: _work(fails="transient", times=99) | {"max_attempts": rng.randint(1, 3)}),
    Kind("overrun", 0.5, _DEAD, lambda rng: _work(seconds=30.0) | {"max_runtime_sec": 0.3, "max_attempts": 2}),
)


def draw(rng: Random, kinds: Sequence[Kind], number: int, ledger: str) -> tuple[Body, Submitted]:
    """The body of the next job, and what will be known of it once it is accepted."""
    kind = rng.choices(kinds, [kind.weight for kind in kinds])[0]
    body = kind.body(rng)
    body |= {"job_id": f"{kind.name}-{number:06d}", "agent": rng.choice(("ada", "bob", "cyd"))}
    body["priority"] = rng.choice((0, 0, 0, 50, -50))
    body["payload"] = body["payload"] | {"ledger": ledger}
    starts = body.get("earliest_start_at")
    not_before = datetime.fromisoformat(starts).timestamp() if starts else None
    return body, Submitted(body["job_id"], kind.name, kind.ends, not_before)
