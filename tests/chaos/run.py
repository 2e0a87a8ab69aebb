"""One chaos run from the first server to the verdict."""

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pymysql

from orchestrator.policies import Scope, parse
from orchestrator.settings import Settings
from orchestrator.store import policies
from orchestrator.store.database import Database
from tests.chaos import history
from tests.chaos.checker import Violation, check
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.history import History, Recorder
from tests.chaos.kinds import CAPS, KINDS, Kind
from tests.chaos.load import Load
from tests.chaos.sites import ROOT, SHORT_TIMES, Site, Sites, watch
from tests.chaos.storm import Storm
from tests.chaos.watching import Watcher
from tests.servers import MariaDB, Redis
from tests.tables import make_tables
from tests.waiting import wait_until

#: Seconds without any job ending after which the rest counts as hung. A job that found no GPU may wait for 36.
HUNG_S = 60.0
#: Seconds for streams and leases to be tidied up after the last job.
TIDY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    jobs: int = 20_000
    faults: int = 200
    #: Seconds between two faults of one of the two sources, at least and at most.
    calm_s: tuple[float, float] = (0.5, 4.0)
    orchestrators: int = 2
    workers: int = 3
    slots: int = 8
    only: Sequence[Fault] = FAULTS
    kinds: Sequence[Kind] = KINDS
    build: Path = ROOT
    times: dict[str, Any] = field(default_factory=lambda: dict(SHORT_TIMES))


@dataclass(frozen=True)
class Report:
    plan: Plan
    history: History
    violations: list[Violation]
    figures: dict[str, Any]
    #: Exceptions in the logs that nobody expected: message → how often, and the first of them.
    traces: dict[str, tuple[int, str]]


def run(plan: Plan, tell: Callable[[str], None] = lambda _text: None, folder: Path | None = None) -> Report:
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-chaos-")))
        mariadb, redis = stack.enter_context(MariaDB()), stack.enter_context(Redis())
        prepare(mariadb, folder)
        recorder = Recorder()
        sites = Sites(mariadb, redis, folder, recorder, plan.build)
        stack.callback(sites.close)
        sites.open(plan.orchestrators, plan.workers, worker_slots=plan.slots, **plan.times)
        tell(f"{len(sites.orchestrators)} orchestrators and {len(sites.workers)} workers are up; seed {plan.seed}")
        return _storm(plan, sites, recorder, tell)


def prepare(mariadb: MariaDB, folder: Path) -> None:
    """Make tables and set caps, as an operator would before the first start."""
    db = Database(Settings(database_url=mariadb.url, data_dir=folder))
    try:
        make_tables(db.engine)
        for key, most in CAPS.items():
            cap = parse(Scope.CONCURRENCY, {"max": most})
            db.write(partial(policies.put, scope=Scope.CONCURRENCY, name=key, document=cap))
    finally:
        db.close()


def _storm(plan: Plan, sites: Sites, recorder: Recorder, tell: Callable[[str], None]) -> Report:
    ledger = sites.folder / "ledger.jsonl"
    rng = random.Random(f"{plan.seed} load")
    load = Load(sites.orchestrators, recorder, rng, plan.jobs, str(ledger), plan.kinds)
    per_fault = plan.jobs / max(plan.faults, 1)
    storm = Storm(
        sites,
        recorder,
        plan.seed,
        plan.faults,
        plan.calm_s,
        plan.only,
        on_fault=lambda done: load.allow(round((done + 2) * per_fault)),
    )
    watcher = Watcher(sites, recorder)
    began = time.monotonic()
    stop_watching = watch("chaos-watcher", watcher.look, 0.2)
    stop_telling = watch("chaos-progress", lambda: tell(_progress(storm, load, sites, recorder, began)), 10.0)
    try:
        load.allow(round(2 * per_fault))
        load.start()
        storm.start()
        while not (storm.over and load.over):
            if storm.over:
                load.allow(plan.jobs)
            time.sleep(0.1)
        stormed = time.monotonic()
        sites.mend()
        drain(sites)
        drained = time.monotonic()
        tidy(sites)
    finally:
        storm.close()
        load.close()
        stop_telling()
        stop_watching()
    found = history.collect(
        recorder,
        sites.mariadb,
        sites.redis,
        ledger,
        max_crashes=sites.workers[0].settings.max_crashes,
        prefix=sites.workers[0].settings.stream_prefix,
    )
    figures = _figures(found, storm, load, watcher) | {
        "storm_s": round(stormed - began, 1),
        "drain_s": round(drained - stormed, 1),
    }
    return Report(plan, found, check(found), figures, traces(sites.all))


def drain(sites: Sites) -> None:
    """Until every job has ended, or none does any more."""
    left, since = -1, time.monotonic()
    while time.monotonic() - since < HUNG_S:
        try:
            now = sites.unfinished()
        except pymysql.MySQLError:
            now = left
        if now == 0:
            return
        if now != left:
            left, since = now, time.monotonic()
        time.sleep(0.1)


def tidy(sites: Sites) -> None:
    """Until no entry and no lease is left, or for as long as that may take; the checker judges what it finds."""
    prefix = sites.workers[0].settings.stream_prefix

    def all_gone() -> bool:
        entries = history.streams(sites.redis, prefix).values()
        leases = sites.query("SELECT COUNT(*) FROM orchestrator_leases WHERE state = 'active'")
        return not any(length or pending for length, pending in entries) and leases[0][0] == 0

    try:
        wait_until(all_gone, timeout=TIDY_S)
    except AssertionError:
        return


def _progress(storm: Storm, load: Load, sites: Sites, recorder: Recorder, began: float) -> str:
    try:
        open_jobs = str(sites.unfinished())
    except pymysql.MySQLError:
        open_jobs = "?"
    return (
        f"{time.monotonic() - began:6.0f} s  {storm.injected.total():4d} faults  "
        f"{len(recorder.submitted):6d} accepted  {open_jobs:>5s} open  {len(recorder.incidents)} incidents"
    )


def _figures(found: History, storm: Storm, load: Load, watcher: Watcher) -> dict[str, Any]:
    events = Counter(event["event_type"] for event in found.audit)
    return {
        "jobs_accepted": len(found.submitted),
        "ends": dict(Counter(row["status"] for row in found.jobs.values()).most_common()),
        "faults": storm.injected.total(),
        "faults_by_name": dict(storm.injected.most_common()),
        "faults_that_came_to_nothing": len(storm.errors),
        "handler_starts": sum(line.event == "start" for line in found.lines),
        "most_attempts": max((row["attempt"] for row in found.jobs.values()), default=0),
        "unanswered_submits": load.lost_answers,
        "workers_lost": events["worker.lost"],
        "terms": events["leader.elected"],
        "retries": events["job.retry"],
        "cancels_granted": len(found.cancel_granted),
        "hand_backs": events["job.handed_back"],
        "looks_at_leases": watcher.looks,
        "most_leased_mb": watcher.most_leased_mb,
        "ended_by_themselves": [item.text for item in found.happened if "ended by itself" in item.text],
    }


def traces(sites: Sequence[Site]) -> dict[str, tuple[int, str]]:
    """Exceptions that were logged with their trace: in this code base, those nobody expected."""
    found: dict[str, tuple[int, str]] = {}
    for site in sites:
        for log in site.logs:
            for line in log.read_text(errors="replace").splitlines():
                if "Traceback" in line:
                    message, trace = _trace(line)
                    count, first = found.get(message, (0, f"{log.name}: {trace}"))
                    found[message] = (count + 1, first)
    return found


def _trace(line: str) -> tuple[str, str]:
    try:
        entry = json.loads(line)
    except ValueError:
        return "not logged", line
    text = str(entry.get("exception") or entry.get("exc_info") or line)
    return f"{entry.get('event')}: {text.strip().splitlines()[-1][:160]}", text[-3000:]
