"""`gpuorch top`: the whole system on one screen, again and again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from orchestrator.cli import screen
from orchestrator.cli.frame import Look, frame
from orchestrator.cli.http import with_api
from orchestrator.cli.options import as_json
from orchestrator.cli.output import print_json
from orchestrator.cli.pages import whole
from orchestrator.cli.progress import Pace
from orchestrator.cli.style import columns
from orchestrator.client.api import Api
from orchestrator.errors import OrchestratorError

#: A frame that goes to a file: as wide as a wide terminal, and as long as it is.
PLAIN_WIDTH, PLAIN_HEIGHT = 120, 10_000
HINT = "q ends · any other key looks again"


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.2, 3600), default=2.0, show_default=True, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="One frame, without taking the screen.")
@with_api
@as_json
def top(api: Api, *, interval: float, once: bool, as_json: bool) -> None:
    """Show jobs, lanes, workers and GPUs, live; q or Ctrl-C ends it. Without a terminal: one frame."""
    seeing = Seeing(api)
    look = seeing.look()
    if as_json:
        print_json(_document(look))
    elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        click.echo("\n".join(frame(look, *_plain_size())))
    else:
        _watch(seeing, look, interval)


def _watch(seeing: Seeing, look: Look, interval: float) -> None:
    try:
        with screen.opened() as shown:
            while True:
                shown.draw(frame(look, *shown.size, hint=HINT))
                key = shown.wait(interval)
                if key in {"q", "Q", "\x1b"}:
                    return
                if key != "resize":
                    look = seeing.look_again()
    except KeyboardInterrupt:
        return  # as good an end as any


def _plain_size() -> tuple[int, int]:
    return columns() or PLAIN_WIDTH, PLAIN_HEIGHT


class Seeing:
    """Looks at a server, one after the other; rates need two."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._last: Look | None = None
        self._ends = Ends()

    def look(self) -> Look:
        """Raises ServerUnreachable or Refused."""
        get = self._api.get
        workers = whole(self._api, "/workers", "workers")["workers"]
        done, failed = self._ends.rates(workers)
        self._last = Look(
            url=self._api.url,
            stats=get("/jobs/stats"),
            workers=workers,
            gpus=get("/gpus")["gpus"],
            leader=get("/control/leader"),
            paused=get("/control/paused")["paused"],
            done_rate=done,
            failed_rate=failed,
            clock=_clock(),
        )
        return self._last

    def look_again(self) -> Look:
        """A server that is away for a while is said to be, over what it said last."""
        assert self._last is not None
        try:
            return self.look()
        except OrchestratorError as error:
            return dataclasses.replace(self._last, error=str(error), clock=_clock(), done_rate=0.0, failed_rate=0.0)


class Ends:
    """How many jobs workers end, per second. Each counts for itself, and its count leaves with it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        self._sums = [0, 0]
        self._paces = Pace(), Pace()

    def rates(self, workers: Sequence[Mapping[str, Any]], now: float | None = None) -> tuple[float, float]:
        for worker in workers:
            counts = int(worker["jobs_done"]), int(worker["jobs_failed"])
            before = self._seen.get(worker["worker_id"])
            for n in (0, 1):
                # One that is new has counted before we looked.
                self._sums[n] += max(0, counts[n] - before[n]) if before else 0
            self._seen[worker["worker_id"]] = counts
        done, failed = (pace.of(total, now) for pace, total in zip(self._paces, self._sums, strict=True))
        return done, failed


def _document(look: Look) -> dict[str, Any]:
    return {
        "leader": look.leader,
        "stats": look.stats,
        "workers": list(look.alive),
        "gpus": list(look.gpus),
        "paused": list(look.paused),
    }


def _clock() -> str:
    return f"{datetime.now(UTC):%H:%M:%S} UTC"
