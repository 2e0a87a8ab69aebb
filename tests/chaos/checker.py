"""What must hold of a history, as pure functions: each yields what it found broken, under the invariant's number.

The job rows and the audit are the system's word, the ledger is that of the handlers. A history is judged after all
faults have stopped and everything has drained: a job that has not ended by then is hung.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from orchestrator.jobs import TERMINAL
from tests.chaos.history import History
from tests.chaos.ledger import Line

ENDS = {f"job.{status}": str(status) for status in TERMINAL} | {"job.expired": "failed"}
#: Events that take a job from its attempt, besides its ends.
RETURNS = {"job.retry", "job.handed_back"}
#: Ends that may also come while nobody owns the job: its last attempt has ended before, or there was none.
WITHDRAWALS = {"job.cancelled", "job.expired"}
#: Seconds by which the database's clock and the handlers' may seem to differ on one host.
CLOCK_SLACK_S = 0.25


class Violation(NamedTuple):
    invariant: str
    job_id: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.job_id or ''}: {self.text}"


class View:
    """A history by job."""

    def __init__(self, history: History) -> None:
        self.history = history

    @cached_property
    def events(self) -> dict[str, list[dict[str, Any]]]:
        found = defaultdict(list)
        for event in self.history.audit:
            if event["job_id"]:
                found[event["job_id"]].append(event)
        return found

    @cached_property
    def lines(self) -> dict[str, list[Line]]:
        found = defaultdict(list)
        for line in self.history.lines:
            found[line.job_id].append(line)
        return found

    @cached_property
    def lost_workers(self) -> set[str]:
        return {event["worker_id"] for event in self.history.audit if event["event_type"] == "worker.lost"}

    def database_time(self, event: dict[str, Any]) -> float:
        return float(event["ts"].replace(tzinfo=UTC).timestamp())

    def named(self, job_id: str, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events[job_id] if event["event_type"] in names]


Check = Callable[[View], Iterable[Violation]]


def check(history: History) -> list[Violation]:
    """Everything that is wrong with a history, what was seen during the run first."""
    view = View(history)
    found = [Violation(*incident) for incident in history.incidents]
    return found + [violation for one in CHECKS for violation in one(view)]


# ── jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def accepted_jobs_exist(view: View) -> Iterator[Violation]:
    for job_id in view.history.submitted:
        if job_id not in view.history.jobs:
            yield Violation("INV-1", job_id, "was accepted, and has no row")


def jobs_ended(view: View) -> Iterator[Violation]:
    for job_id, row in view.history.jobs.items():
        if row["status"] not in TERMINAL:
            yield Violation("INV-1", job_id, f"hung: still {row['status']} ({row['queued']}) after everything drained")


def jobs_ended_as_they_should(view: View) -> Iterator[Violation]:
    for job_id, job in view.history.submitted.items():
        row = view.history.jobs.get(job_id)
        allowed = job.ends | ({"cancelled"} if job_id in view.history.cancel_asked else frozenset())
        if row is None or row["status"] not in TERMINAL or row["status"] in allowed:
            continue
        used_up = row["attempts"] >= row["max_attempts"] or row["crashes"] >= view.history.max_crashes
        if row["status"] != "dead_letter" or not used_up:
            counted = f"{row['attempts']} of {row['max_attempts']} attempts, {row['crashes']} crashes"
            yield Violation("INV-1", job_id, f"a {job.kind} job ended as {row['status']} with {counted}")


def one_end(view: View) -> Iterator[Violation]:
    for job_id, row in view.history.jobs.items():
        ends = [(ENDS[event["event_type"]], event["attempt"]) for event in view.named(job_id, *ENDS)]
        if row["status"] in TERMINAL and ends != [(row["status"], row["attempt"])]:
            yield Violation("INV-2", job_id, f"is {row['status']} by attempt {row['attempt']}; audited ends: {ends}")


def attempts_increase(view: View) -> Iterator[Violation]:
    for job_id, row in view.history.jobs.items():
        claims = [event["attempt"] for event in view.named(job_id, "job.claimed")]
        if claims != list(range(1, len(claims) + 1)) or row["attempt"] != len(claims):
            yield Violation("INV-3", job_id, f"is at attempt {row['attempt']}; claimed attempts: {claims}")


def attempts_end_once(view: View) -> Iterator[Violation]:
    for job_id, row in view.history.jobs.items():
        ended = Counter(event["attempt"] for event in view.named(job_id, *(ENDS.keys() - WITHDRAWALS), *RETURNS))
        claimed = Counter(event["attempt"] for event in view.named(job_id, "job.claimed"))
        ended.update({event["attempt"] for event in view.named(job_id, *WITHDRAWALS)} & (claimed.keys() - ended.keys()))
        if row["status"] in TERMINAL and ended != claimed:
            yield Violation("INV-2", job_id, f"attempts claimed {dict(claimed)}, ended {dict(ended)}")


def starts_were_claimed(view: View) -> Iterator[Violation]:
    """Each start has a claim of its own, and the claim came first."""
    for job_id, lines in view.lines.items():
        claimed = {event["attempt"]: view.database_time(event) for event in view.named(job_id, "job.claimed")}
        for attempt, times in Counter(line.attempt for line in lines if line.event == "start").items():
            if attempt not in claimed:
                yield Violation("INV-3", job_id, f"attempt {attempt} started without a claim")
            elif times > 1:
                yield Violation("INV-3", job_id, f"attempt {attempt} started {times} times")
        for line in lines:
            early = claimed.get(line.attempt, 0.0) - view.history.wall(line.mono)
            if line.event == "start" and early > CLOCK_SLACK_S:
                yield Violation("INV-3", job_id, f"attempt {line.attempt} started {early:.2f} s before its claim")


def results_are_the_handlers(view: View) -> Iterator[Violation]:
    """A done job's result is what that very attempt returned, and nothing else has a result."""
    for job_id, row in view.history.jobs.items():
        result = view.history.results.get(job_id)
        if row["status"] != "done":
            if result is not None:
                yield Violation("INV-2", job_id, f"is {row['status']}, and has a result of attempt {result['attempt']}")
            continue
        if result is None or result["attempt"] != row["attempt"]:
            yield Violation("INV-2", job_id, f"done by attempt {row['attempt']}; result: {result}")
            continue
        wrote = [line for line in view.lines[job_id] if line.event == "done" and line.attempt == row["attempt"]]
        if [line.nonce for line in wrote] != [result["result"].get("nonce")]:
            yield Violation("INV-2", job_id, f"its result {result['result']} is not in the handlers' ledger: {wrote}")


def attempts_are_bounded(view: View) -> Iterator[Violation]:
    for job_id, row in view.history.jobs.items():
        handed_back = len(view.named(job_id, "job.handed_back"))
        if row["attempts"] > row["max_attempts"] or row["attempt"] > row["max_attempts"] + handed_back:
            counted = f"{row['attempts']} charged, {row['attempt']} in all, {handed_back} handed back"
            yield Violation("INV-6", job_id, f"{counted}; at most {row['max_attempts']} are allowed")
        if row["crashes"] > view.history.max_crashes:
            yield Violation(
                "INV-6", job_id, f"{row['crashes']} crashes; at most {view.history.max_crashes} are allowed"
            )


def attempts_do_not_overlap(view: View) -> Iterator[Violation]:
    """Two attempts run at the same time only when the earlier one's worker had been declared lost."""
    for job_id, lines in view.lines.items():
        starts = {line.attempt: line.mono for line in lines if line.event == "start"}
        ends = {line.attempt: line.mono for line in lines if line.event != "start"}
        owner = {event["attempt"]: event["worker_id"] for event in view.named(job_id, "job.claimed")}
        for earlier, later in combinations(sorted(starts), 2):
            overlap = ends.get(earlier, 0.0) - starts[later]
            if overlap > 0 and owner.get(earlier) not in view.lost_workers:
                both = f"attempts {earlier} and {later} ran together for {overlap:.2f} s"
                yield Violation("INV-13", job_id, f"{both}, and {owner.get(earlier)} was not declared lost")


def cancelled_jobs_stay_cancelled(view: View) -> Iterator[Violation]:
    for job_id in view.history.cancel_granted:
        row = view.history.jobs.get(job_id)
        if row is not None and row["status"] != "cancelled":
            yield Violation("INV-11", job_id, f"its cancel was granted, and it ended as {row['status']}")


def nothing_runs_after_its_end(view: View) -> Iterator[Violation]:
    """No attempt starts after the job's end; one that is still running then is that of a worker declared lost."""
    for job_id, lines in view.lines.items():
        owner = {event["attempt"]: event["worker_id"] for event in view.named(job_id, "job.claimed")}
        ends = [view.database_time(event) for event in view.named(job_id, *ENDS)]
        for line in lines:
            late = view.history.wall(line.mono) - max(ends, default=float("inf"))
            if late > CLOCK_SLACK_S and (line.event == "start" or owner.get(line.attempt) not in view.lost_workers):
                yield Violation("INV-11", job_id, f"{line.event} of attempt {line.attempt} {late:.2f} s after its end")


def delayed_jobs_waited(view: View) -> Iterator[Violation]:
    for job_id, job in view.history.submitted.items():
        starts = [view.history.wall(line.mono) for line in view.lines[job_id] if line.event == "start"]
        if job.not_before and starts and min(starts) < job.not_before - CLOCK_SLACK_S:
            yield Violation("INV-9", job_id, f"started {job.not_before - min(starts):.2f} s before its time")


# ── everything else ─────────────────────────────────────────────────────────────────────────────────────────────


def leases_are_returned(view: View) -> Iterator[Violation]:
    for gpu in view.history.gpus:
        if gpu["leased_mb"] != 0:
            yield Violation("INV-17", None, f"{gpu['leased_mb']} MB of {gpu['gpu_uuid']} stay leased")
    for lease in view.history.leases:
        yield Violation("INV-17", lease["job_id"], f"its lease of {lease['memory_mb']} MB stays active")


def seats_are_given_back(view: View) -> Iterator[Violation]:
    for cap in view.history.caps:
        if cap["in_use"] != 0:
            yield Violation("INV-25", None, f"{cap['in_use']} seats of {cap['cap_key']} stay taken")


def streams_are_empty(view: View) -> Iterator[Violation]:
    for name, (length, pending) in view.history.streams.items():
        if length or pending:
            yield Violation("INV-4", None, f"{name} keeps {length} entries, {pending} of them pending")


def epochs_increase(view: View) -> Iterator[Violation]:
    elected = [event["details"]["epoch"] for event in view.history.audit if event["event_type"] == "leader.elected"]
    for before, after in pairwise(elected):
        if after <= before:
            yield Violation("INV-18", None, f"epoch {after} was elected after epoch {before}")


def letters_match(view: View) -> Iterator[Violation]:
    """Dead letters are of dead jobs. The stream may have been flushed; the table, where there is one, has them all."""
    dead = {job_id for job_id, row in view.history.jobs.items() if row["status"] == "dead_letter"}
    for letter in view.history.letters:
        job_id = letter.get("job_id")
        if job_id in view.history.submitted and job_id not in dead:
            yield Violation("INV-6", job_id, f"is no dead letter, and was buried in the stream: {letter.get('reason')}")
    if view.history.dead_letters is None:
        return
    buried = Counter(letter["job_id"] for letter in view.history.dead_letters)
    for job_id in dead - buried.keys():
        yield Violation("INV-6", job_id, "is a dead letter, and the table of dead letters does not have it")
    for job_id, times in buried.items():
        if job_id in view.history.submitted and (job_id not in dead or times > 1):
            yield Violation("INV-6", job_id, f"stands {times} times in the table of dead letters")


CHECKS: tuple[Check, ...] = (
    accepted_jobs_exist,
    jobs_ended,
    jobs_ended_as_they_should,
    one_end,
    attempts_increase,
    attempts_end_once,
    starts_were_claimed,
    results_are_the_handlers,
    attempts_are_bounded,
    attempts_do_not_overlap,
    cancelled_jobs_stay_cancelled,
    nothing_runs_after_its_end,
    delayed_jobs_waited,
    leases_are_returned,
    seats_are_given_back,
    streams_are_empty,
    epochs_increase,
    letters_match,
)
