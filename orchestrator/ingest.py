"""Events become jobs: every orchestrator reads the stream of events and submits what their triggers make of them.

At least once, and one job: an event is acknowledged after its jobs are committed, and their ids are made of it, so that
an event that comes again finds them. Jobs come in as every submit does. Who is told to come later keeps the event and
tries again; an event of which no job can be made goes to the dead letters, and the others go on.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from orchestrator.backoff import doubled, spread
from orchestrator.dead_letters import DeadLetter
from orchestrator.errors import (
    AgentLimit,
    GateClosed,
    InvalidInput,
    OrchestratorError,
    Overloaded,
    Paused,
    QueueFull,
    RateLimited,
    Unavailable,
)
from orchestrator.jobs import NewJob
from orchestrator.jsontext import ESCAPED
from orchestrator.policies import Book
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from orchestrator.store.policies import Copy
from orchestrator.store.submit import PERMANENT, Answer, refusal
from orchestrator.stream.hub import Hub
from orchestrator.stream.ingest import Delivery
from orchestrator.telemetry import tracing
from orchestrator.telemetry.seldom import Seldom
from orchestrator.triggers import Event, job_body, type_of

log = logging.getLogger(__name__)

#: Events that are read, or taken over, at once.
READ = 100
#: Events that may wait here until their jobs are let in, and their bytes; with so many, nothing new is read before some
#: are put aside.
MAX_HELD, MAX_HELD_BYTES = 1000, 64 * 2**20
#: Tries that break for no reason we have a name for, before the event counts as poison.
MAX_BREAKS = 5
#: Characters that all but the payload of a job may take from an event.
ENVELOPE = 65_536
#: Seconds until the next try, at least and at most.
SOONEST_S, LATEST_S = 0.1, 5.0

#: Refusals that others need not meet at the same moment: of an agent, a lane, a pool, or of GPU work.
ITS_OWN = (RateLimited, AgentLimit, QueueFull, GateClosed, Paused)

Submit = Callable[[Sequence[NewJob]], Future[list[Answer]]]


@dataclass
class Pending:
    """An event that was delivered to us and is not handled yet."""

    delivery: Delivery
    due: float
    breaks: int = 0
    #: It was refused for what others may not be.
    refused: bool = False

    def broke(self, error: Exception) -> OrchestratorError:
        """Nobody foresaw this: perhaps it was the moment, and perhaps the event."""
        self.breaks += 1
        message = f"it broke {self.breaks} times, at last by {type(error).__name__}: {error}"
        return InvalidInput(message) if self.breaks >= MAX_BREAKS else Unavailable(message)


@dataclass(frozen=True)
class Begun:
    """The jobs of one event on their way into the store, and what stops others of them."""

    jobs: list[NewJob]
    answers: Future[list[Answer]] | None
    refusals: list[OrchestratorError]


class Ingest:
    """The thread that reads events. It survives its servers; close it before what it submits to."""

    def __init__(
        self, db: Database, hub: Hub, settings: Settings, policies: Copy, submit: Submit, consumer: str
    ) -> None:
        self._db = db
        self._hub = hub
        self._settings = settings
        self._submit = submit
        self._events = hub.events(consumer)
        self._policies = policies
        self._held: dict[str, Pending] = {}
        self._look_at = 0.0
        self._away = Seldom()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ingest", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more; `close` waits for what was begun."""
        self._stop.set()

    def close(self) -> None:
        """What is not acknowledged stays pending; another instance takes it over."""
        self.stop()
        self._events.ear.release(self._thread, self._settings.db_timeout_s + self._settings.redis_timeout_s)

    def _loop(self) -> None:
        failures = 0
        while not self._stop.is_set():
            failures = 0 if self.attempt() else failures + 1
            if failures:
                self._stop.wait(spread(doubled(SOONEST_S, failures, LATEST_S)))

    def attempt(self) -> bool:
        """A step; whether it went well. A server that is away is tried again soon, and told of seldom."""
        try:
            self.step()
        except Unavailable as away:
            if self._away.due():
                log.warning("events wait", extra={"error": str(away)})
            return False
        except Exception:
            log.exception("ingest broke")
            return False
        if self._away.over():
            log.info("events flow again")
        return True

    def step(self) -> None:
        """One round: what others left behind, what is new, then whatever is due."""
        if time.monotonic() >= self._look_at:
            self._look_around()
        if not self._room:
            self._put_aside()
        if self._room:
            self._hold(self._events.read(self._room, self._patience_ms()))
        else:
            self._stop.wait(self._patience_ms() / 1000)
        due = [held for held in self._held.values() if held.due <= time.monotonic()]
        if due:
            self._handle(sorted(due, key=lambda held: held.due)[:READ])

    def _put_aside(self) -> None:
        """Half of those that were refused for their own sake: one paused agent must not keep all others' events out.

        They stay pending in our name. Idle as they are then, whoever looks around finds them, when there is room.
        """
        refused = sorted((held for held in self._held.values() if held.refused), key=lambda held: held.due)
        for held in refused[len(refused) // 2 :]:
            del self._held[held.delivery.entry_id]

    @property
    def _room(self) -> int:
        if sum(held.delivery.size for held in self._held.values()) >= MAX_HELD_BYTES:
            return 0
        return min(READ, MAX_HELD - len(self._held))

    def _patience_ms(self) -> int:
        """How long to wait for new events: no longer than until the next thing that is to be done."""
        wake_at = min([self._look_at, *(held.due for held in self._held.values())])
        return round(max(0.0, min((wake_at - time.monotonic()) * 1000, self._settings.redis_block_ms)))

    def _look_around(self) -> None:
        """Keep what is ours, take over what dead instances left."""
        idle_ms = self._settings.claim_idle_ms
        kept = self._events.keep(list(self._held))
        self._held = {entry_id: held for entry_id, held in self._held.items() if entry_id in kept}
        room = min(self._room, MAX_HELD // 2 - len(self._held))  # new ones need room as well
        found = self._events.take_over(idle_ms, room) if room > 0 else []
        self._hold(found)
        self._events.forget_consumers()
        self._look_at = time.monotonic() + (0.0 if found else idle_ms / 3000)

    def _hold(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._held.setdefault(delivery.entry_id, Pending(delivery, time.monotonic()))

    def _handle(self, due: Sequence[Pending]) -> None:
        book = self._db.read(self._policies.book)
        begun = [(held, self._begin(book, held)) for held in due]
        deadline = time.monotonic() + self._settings.db_timeout_s
        done: list[str] = []
        letters: list[DeadLetter] = []
        for held, begin in begun:
            why_not = self._outcome(held, begin, deadline)
            if why_not is None or isinstance(why_not, PERMANENT):
                done.append(held.delivery.entry_id)
            else:
                held.due = time.monotonic() + _delay(why_not)
                held.refused = isinstance(why_not, ITS_OWN)
            if isinstance(why_not, PERMANENT):
                letters.append(_letter(held, why_not))
        self._hub.dead_letters.tell(letters)
        self._events.acknowledge(done)
        for entry_id in done:
            del self._held[entry_id]

    def _begin(self, book: Book, held: Pending) -> Begun:
        """Submit what the triggers make of it: all jobs of an event together, in one transaction."""
        jobs: list[NewJob] = []
        refusals: list[OrchestratorError] = []
        answers = None
        try:
            made = self._made(book, held.delivery)
            jobs += [job for job in made if isinstance(job, NewJob)]
            refusals += [wrong for wrong in made if isinstance(wrong, InvalidInput)]
            answers = self._submit(jobs) if jobs else None
        except OrchestratorError as refused:
            refusals.append(refused)
        except Exception as error:
            log.exception("an event broke", extra={"entry_id": held.delivery.entry_id})
            refusals.append(held.broke(error))
        return Begun(jobs, answers, refusals)

    def _made(self, book: Book, delivery: Delivery) -> list[NewJob | InvalidInput]:
        """A job for each trigger, or what is wrong with it; none when the event has no trigger. Raises InvalidInput."""
        triggers = book.triggered_by(type_of(delivery.fields))
        if not triggers:
            log.debug("an event without a trigger", extra={"entry_id": delivery.entry_id})
            return []
        most, depth = self._settings.payload_max_bytes, self._settings.payload_max_depth
        event = Event.parse(delivery.entry_id, delivery.fields, ESCAPED * most, depth)
        made: list[NewJob | InvalidInput] = []
        with tracing.submitting(None, **{"orchestrator.origin": "trigger", "event.id": delivery.entry_id}) as traced:
            for name, trigger in triggers.items():
                try:
                    body = job_body(name, trigger.job, event, ENVELOPE + most)
                    made.append(NewJob.prepare(body, most, depth, traced.context))
                except InvalidInput as wrong:
                    made.append(wrong)
        return made

    def _outcome(self, held: Pending, begun: Begun, deadline: float) -> OrchestratorError | None:
        """Why the event is not done with; None when all its jobs are stored. What is worth another try comes first."""
        refusals = [*begun.refusals]
        try:
            answers = begun.answers.result(max(0.0, deadline - time.monotonic())) if begun.answers else []
            refusals += filter(None, map(refusal, begun.jobs, answers))
        except OrchestratorError as refused:
            refusals.append(refused)
        except TimeoutError:
            refusals.append(Unavailable("no answer to a submit"))
        except Exception as error:
            log.exception("an event broke", extra={"entry_id": held.delivery.entry_id})
            refusals.append(held.broke(error))
        return min(refusals, key=lambda one: isinstance(one, PERMANENT), default=None)


def _delay(why_not: OrchestratorError) -> float:
    asked = why_not.retry_after_s if isinstance(why_not, Overloaded | Paused) else 1.0
    return max(SOONEST_S, min(asked, LATEST_S)) * random.uniform(1.0, 1.25)


def _letter(held: Pending, why_not: OrchestratorError) -> DeadLetter:
    why = str(why_not).encode(errors="replace").decode()  # half a character of the event's cannot be written
    return DeadLetter("", held.delivery.entry_id, 0, why, "bad_event")
