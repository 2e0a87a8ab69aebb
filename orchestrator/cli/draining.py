"""A worker here until its lane is empty: what `gpuorch queue run` does.

    publisher and a candidate for leader (this process) ▶ worker (child process) ▶ looks at what is left

A leader is needed for retries and delayed jobs; when another one leads, this one only stands by. So nothing else needs
to run than the database and Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import click

from orchestrator.children import end
from orchestrator.cli import REFUSED
from orchestrator.cli.child import spawn, stop_limit_s
from orchestrator.cli.output import print_json
from orchestrator.cli.progress import Pace, Progress
from orchestrator.cli.schema import checked, require_schema
from orchestrator.cli.servers import require_redis
from orchestrator.identity import instance_id
from orchestrator.jobs import DEFAULT_LANE
from orchestrator.leader.loop import LeaderLoop
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import backlog, worker_reads
from orchestrator.store.backlog import MOST_COUNTED, Left
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub
from orchestrator.telemetry import tracing

#: Seconds between two looks at what is left.
LOOK_EVERY_S = 0.5


def run_here(settings: Settings, *, drain: bool, timeout_s: float | None, as_json: bool) -> int:
    """The exit code: 1 when the worker died, or time was over before the lane was empty."""
    lane = settings.worker_pool or DEFAULT_LANE
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    require_redis(settings)
    with checked(settings) as db:
        require_schema(db)
        ended = Ended(db, lane)
        try:
            with _worker(db, settings) as alive:
                reason = _watch(db, lane, ended, alive, lambda left: drain and not left.total, deadline)
        finally:
            left = db.read(lambda conn: backlog.left(conn, lane))
            _report(lane, ended, left, as_json=as_json)
    if reason:
        click.echo(f"gpuorch: {reason}", err=True)
    return REFUSED if reason else 0


class Ended:
    """Jobs of a lane that its workers ended since we look: what each of them counts, less what it had counted."""

    def __init__(self, db: Database, lane: str) -> None:
        self._db, self._lane = db, lane
        self._before = self._counters()
        self.done = self.failed = 0

    def look(self) -> None:
        now = self._counters()
        told = [(one, self._before.get(worker_id, (0, 0))) for worker_id, one in now.items()]
        self.done, self.failed = (max(0, sum(one[n] - was[n] for one, was in told)) for n in (0, 1))

    def _counters(self) -> dict[str, tuple[int, int]]:
        return self._db.read(lambda conn: worker_reads.ended_jobs(conn, self._lane))


@contextmanager
def _worker(db: Database, settings: Settings) -> Iterator[Callable[[], bool]]:
    """Runs while this does; the function says whether it still does."""
    with ExitStack() as running:
        hub = running.enter_context(closing(Hub(settings)))
        hub.ping()
        running.callback(tracing.start(settings, "gpuorch-run"))
        publisher = Publisher(db, hub, settings)
        leader = LeaderLoop(db, hub, publisher, settings, instance_id())
        running.callback(publisher.close)
        publisher.start()
        running.callback(leader.close)
        leader.start()
        worker = spawn(settings)
        running.callback(end, worker, stop_limit_s(settings))
        yield lambda: worker.poll() is None


def _watch(
    db: Database,
    lane: str,
    ended: Ended,
    alive: Callable[[], bool],
    over: Callable[[Left], bool],
    deadline: float,
) -> str | None:
    """Look until it is over; what went wrong otherwise."""
    pace = Pace()
    with Progress() as progress:
        while True:
            left = db.read(lambda conn: backlog.left(conn, lane))
            ended.look()
            count = ended.done + ended.failed
            progress.show(count / max(count + left.total, 1), _text(lane, left, ended, pace.of(count)), change=left)
            if over(left):
                return None
            if not alive():
                return "the worker ended; what it says above tells why"
            if time.monotonic() >= deadline:
                return f"the time is over, and lane {lane} is not empty"
            time.sleep(LOOK_EVERY_S)


def _text(lane: str, left: Left, ended: Ended, rate: float) -> str:
    parts = [f"{lane}: {_count(left.ready)} wait, {left.running} run"]
    parts += [f"{_count(left.delayed)} not due yet"] if left.delayed else []
    parts += [f"{_count(left.blocked)} blocked (see gpuorch jobs explain)"] if left.blocked else []
    parts += [f"{_count(left.coming)} tasks are being added"] if left.coming else []
    parts += [f"{ended.done} done"] + ([f"{ended.failed} failed attempts"] if ended.failed else [])
    return ", ".join(parts) + (f", {rate:.1f}/s" if rate else "")


def _count(number: int) -> str:
    return f"{number}{'+' if number >= MOST_COUNTED else ''}"


def _report(lane: str, ended: Ended, left: Left, *, as_json: bool) -> None:
    ended.look()
    if as_json:
        print_json({"lane": lane, "done": ended.done, "failed_attempts": ended.failed, "left": left})
    else:
        rest = f"{_count(left.total)} left" if left.total else "empty"
        click.echo(f"{lane}: {ended.done} done, {ended.failed} failed attempts, {rest}")
