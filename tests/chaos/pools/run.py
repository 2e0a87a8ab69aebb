"""One run from the first server to the verdict: rounds of storm and calm, then everything is opened and drained."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from orchestrator.store import pools
from tests.chaos import history
from tests.chaos.checker import Violation
from tests.chaos.history import History, Recorder
from tests.chaos.pools import actions, checker, wishes
from tests.chaos.pools.actions import ACTIONS, Action, Scene
from tests.chaos.pools.convergence import lacks
from tests.chaos.pools.load import Load
from tests.chaos.pools.look import Look, look
from tests.chaos.pools.stage import TIMES, Stage
from tests.chaos.run import prepare, traces
from tests.chaos.sites import ROOT, watch
from tests.chaos.watching import Watcher
from tests.servers import MariaDB, Redis
from tests.waiting import wait_until

#: Seconds without any job ending after which the rest counts as hung. A job that found no GPU may wait for 36.
HUNG_S = 60.0
#: Seconds after the last change after which a calm is given up, whatever still happens.
NEVER_S = 120.0
#: Seconds in which nothing may change once everything is as it should be.
QUIET_S = 1.0
#: Shortcomings of one moment that are told.
SHOWN = 6

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    minutes: float = 5.0
    pools: int = 20
    orchestrators: int = 2
    nodes: int = 3
    gpus: str = "sim:2x24576"
    jobs_per_s: float = 3.0
    #: Seconds of each storm, and between two actions.
    storm_s: float = 15.0
    calm_s: tuple[float, float] = (0.1, 0.8)
    #: Seconds from the last effect until everything must be as it should be.
    settle_s: float = 10.0
    only: Sequence[Action] = tuple(ACTIONS)
    #: Stop at the first calm in which something is wrong: enough to catch a broken build.
    hasty: bool = False
    build: Path = ROOT


@dataclass(frozen=True)
class Calm:
    """`changed_s`: from the last change until all was as it should be; `settled_s`: from the last effect."""

    changed_s: float
    settled_s: float
    lacking: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    plan: Plan
    history: History
    violations: list[Violation]
    figures: dict[str, Any]
    calms: list[Calm]
    #: Exceptions in the logs that nobody expected: message → how often, and the first of them.
    traces: dict[str, tuple[int, str]]


def run(plan: Plan, tell: Tell = lambda _text: None, folder: Path | None = None) -> Report:
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-pools-")))
        mariadb, redis = stack.enter_context(MariaDB()), stack.enter_context(Redis())
        prepare(mariadb, folder)
        stage = Stage(mariadb, redis, folder, Recorder(), plan.build)
        stack.callback(stage.close)
        stage.open(plan.orchestrators, plan.nodes, plan.gpus)
        tell(f"{plan.orchestrators} orchestrators and {plan.nodes} nodes are up; seed {plan.seed}")
        return Run(plan, stage, tell).run()


class Run:
    def __init__(self, plan: Plan, stage: Stage, tell: Tell) -> None:
        self._plan = plan
        self._stage = stage
        self._tell = tell
        self._recorder = stage.recorder
        self._wishes = wishes.draw(Random(f"{plan.seed} wishes"), plan.pools)
        self._scene = Scene(stage, self._wishes, Random(f"{plan.seed} actions"))
        self._watcher = Watcher(stage, stage.recorder)
        self._calms: list[Calm] = []
        self._most_slots = 0
        urls = [site.url for site in stage.orchestrators]
        rng = Random(f"{plan.seed} load")
        self._load = Load(urls, self._wishes, stage.recorder, rng, str(stage.ledger), plan.jobs_per_s)

    def run(self) -> Report:
        stop_watching = watch("pools-watcher", self._watcher.look, 0.3)
        began = time.monotonic()
        try:
            self._begin()
            while time.monotonic() - began < 60 * self._plan.minutes and not self._had_enough:
                self._storm()
                self._calm("calm")
            self._load.close()
            stormed = time.monotonic()
            if not self._had_enough:
                self._finish()
        finally:
            self._load.close()
            stop_watching()
        found = self._collect()
        figures = self._figures(found) | {
            "storm_s": round(stormed - began, 1),
            "end_s": round(time.monotonic() - stormed, 1),
        }
        happened = [f"{item.mono - self._recorder.began:8.2f} {item.text}\n" for item in self._recorder.happened]
        (self._stage.folder / "actions.log").write_text("".join(happened))
        hurt = checker.Hurt(self._stage.hurt_supervisors, self._stage.hurt_workers)
        violations = checker.check(found, hurt)
        return Report(self._plan, found, violations, figures, self._calms, traces(self._stage.sites))

    @property
    def _had_enough(self) -> bool:
        return self._plan.hasty and bool(self._recorder.incidents)

    # ── the storm ───────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Most pools are there from the beginning."""
        for wish in self._wishes[: -max(len(self._wishes) // 5, 1)]:
            self._scene.write(partial(pools.create, spec=wish.spec(self._scene.rng)))
        self._load.start()

    def _storm(self) -> None:
        rng, plan = self._scene.rng, self._plan
        ends = time.monotonic() + plan.storm_s
        self._load.flow()
        while time.monotonic() < ends:
            (chosen,) = rng.choices(plan.only, [action.weight for action in plan.only])
            self._scene.perform(chosen)
            time.sleep(rng.uniform(*plan.calm_s))
            self._stage.do_what_is_due()
        self._load.hold()
        self._stage.do_what_is_due(all_of_it=True)

    # ── the calm ────────────────────────────────────────────────────────────────────────────────────────────

    def _calm(self, name: str) -> None:
        """Wait until everything is as it should be and stays so; what takes too long is an incident."""
        stage, effect = self._stage, self._stage.changed_at
        while True:
            moment = look(stage)
            self._most_slots = max(self._most_slots, len(moment.slots))
            effect = max(effect, moment.last_effect)
            lacking = lacks(moment)
            self._note(lacking)
            calm = Calm(moment.mono - stage.changed_at, max(moment.mono - effect, 0.0), lacking)
            if not lacking and self._stays(moment):
                break
            if lacking and (calm.settled_s > self._plan.settle_s or calm.changed_s > NEVER_S):
                self._unsettled(name, calm)
                break
            time.sleep(0.2)
        self._calms.append(calm)
        self._tell(self._progress(name, calm))

    def _note(self, lacking: list[str]) -> None:
        """For whoever wants to know what took so long."""
        with (self._stage.folder / "lacking.log").open("a") as file:
            file.write(f"{time.monotonic() - self._recorder.began:8.2f} {len(lacking)} {'; '.join(lacking[:SHOWN])}\n")

    def _stays(self, before: Look) -> bool:
        """Whether nothing changes any more. What changes without a cause is an incident; jobs that end are a cause."""
        time.sleep(QUIET_S)
        after = look(self._stage)
        if after.last_effect > before.mono or after.waiting != before.waiting or after.owned != before.owned:
            return not lacks(after)
        if after.last_pool_event != before.last_pool_event:
            rows = self._stage.query(
                "SELECT event_type, pool_id, details FROM orchestrator_audit"
                f" WHERE event_type LIKE 'pool.%' AND id > {before.last_pool_event}"
            )
            self._recorder.incident("INV-23", None, f"everything was as it should be, and changed: {rows[:SHOWN]}")
        return True

    def _unsettled(self, name: str, calm: Calm) -> None:
        took = f"{calm.settled_s:.1f} s after the last effect, {calm.changed_s:.1f} s after the last change"
        self._recorder.incident("INV-23", None, f"{name}: {took}: {'; '.join(calm.lacking[:SHOWN])}")

    def _progress(self, name: str, calm: Calm) -> str:
        jobs = dict(self._stage.query("SELECT status, COUNT(*) FROM orchestrator_jobs GROUP BY status"))
        verdict = f"not as it should be: {calm.lacking[:SHOWN]}" if calm.lacking else "as it should be"
        times = f"{calm.changed_s:.1f} s after the last change, {calm.settled_s:.1f} s after the last effect"
        return f"{name}: {verdict} {times}; {self._scene.done.total()} actions, jobs {jobs}"

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        """Close everything, open all of it modestly, let every job end, close everything again."""
        scene = self._scene
        actions.bring_everything_back(scene)
        actions.close_all(scene)
        self._calm("all pools closed")
        actions.open_modestly(scene)
        self._drain()
        self._calm("all pools open, all jobs over")
        actions.close_all(scene)
        self._calm("all pools closed again")
        self._tidy()

    def _drain(self) -> None:
        """Until every job has ended, or none does any more."""
        left, since = -1, time.monotonic()
        while left and time.monotonic() - since < HUNG_S:
            now = sum(self._unfinished().values())
            left, since = now, time.monotonic() if now != left else since
            time.sleep(0.2)
        self._stage.touch()

    def _unfinished(self) -> Counter[str]:
        ended = "('done', 'skipped', 'failed', 'cancelled', 'dead_letter')"
        query = f"SELECT lane, COUNT(*) FROM orchestrator_jobs WHERE status NOT IN {ended} GROUP BY lane"
        return Counter(dict(self._stage.query(query)))

    def _tidy(self) -> None:
        """Until no entry is left, or for as long as that may take; the checker judges what it finds."""
        prefix = self._stage.orchestrators[0].settings.stream_prefix
        try:
            wait_until(lambda: not any(map(any, history.streams(self._stage.redis, prefix).values())), timeout=30.0)
        except AssertionError:
            return

    def _collect(self) -> History:
        stage = self._stage
        prefix = stage.orchestrators[0].settings.stream_prefix
        return history.collect(
            self._recorder, stage.mariadb, stage.redis, stage.ledger, max_crashes=TIMES["max_crashes"], prefix=prefix
        )

    def _figures(self, found: History) -> dict[str, Any]:
        events = Counter(event["event_type"] for event in found.audit)
        settled = [calm.settled_s for calm in self._calms if not calm.lacking]
        changed = [calm.changed_s for calm in self._calms if not calm.lacking]
        return {
            "jobs_accepted": len(found.submitted),
            "ends": dict(Counter(row["status"] for row in found.jobs.values()).most_common()),
            "hand_backs": events["job.handed_back"],
            "retries": events["job.retry"],
            "most_attempts": max((row["attempt"] for row in found.jobs.values()), default=0),
            "actions": self._scene.done.total(),
            "actions_by_name": dict(self._scene.done.most_common()),
            "actions_that_came_to_nothing": self._scene.failed.total(),
            "workers_registered": events["worker.registered"],
            "workers_lost": events["worker.lost"],
            "terms": events["leader.elected"],
            "assignments": events["pool.assigned"],
            "most_slots_in_a_calm": self._most_slots,
            "most_leased_mb_of_a_gpu": self._watcher.most_leased_mb,
            "looks_at_leases": self._watcher.looks,
            "calms": f"{len(settled)} of {len(self._calms)} became what they should be",
            "since_last_effect_s": _spread(settled),
            "since_last_change_s": _spread(changed),
        }


def _spread(seconds: Sequence[float]) -> str:
    """From the last change or effect until everything was as it should be."""
    if not seconds:
        return "never"
    ordered = sorted(seconds)
    middle, late = ordered[len(ordered) // 2], ordered[-max(len(ordered) // 10, 1)]
    return f"least {ordered[0]:.1f}, median {middle:.1f}, p90 {late:.1f}, most {ordered[-1]:.1f}"
