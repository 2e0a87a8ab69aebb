"""`gpuorch pools …`: workers that keep a model warm for a lane of jobs. Everything goes over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click

from orchestrator.cli import REFUSED, completion
from orchestrator.cli.http import with_api
from orchestrator.cli.options import Command, as_json
from orchestrator.cli.output import print_json, print_record, print_table, printable, tell_of_next
from orchestrator.cli.progress import Progress
from orchestrator.client.api import Api
from orchestrator.client.paths import pool_path
from orchestrator.placement import is_too_large
from orchestrator.pools import MAX_WORKERS, PoolState

_LISTED = ("pool_id", "status", "desired_workers", "spawned_workers", "running", "model_id", "type", "status_reason")
_MEMBERS = ("worker_id", "node_id", "status", "revision", "slots", "ready", "busy", "trouble")
_PLACES = ("node_id", "revision", "workers")
#: Seconds between two looks at a pool that somebody waits for.
LOOK_EVERY_S = 0.5

Pool = dict[str, Any]

_COUNT = click.IntRange(0, MAX_WORKERS)


@click.group()
def pools() -> None:
    """Pools: workers that keep a model warm."""


def _model(command: Command) -> Command:
    """What says which model a pool serves."""
    for flag, text in (
        ("--variant", "Variant of the model; handlers read ctx.variant."),
        ("--adapter", "Adapter on top of it; handlers read ctx.adapter."),
        ("--model", "Model that every slot loads; handlers read ctx.model_id."),
        ("--type", "Job type whose handler loads it before the first job."),
    ):
        name = "model_id" if flag == "--model" else flag.removeprefix("--")
        command = click.option(flag, name, help=text)(command)
    command = click.option("--gpu-count", type=click.IntRange(1, 64), help="GPUs of one slot.")(command)
    command = click.option("--min-memory-mb", type=click.IntRange(0), help="GPU memory of one slot.")(command)
    return click.option("--slots", type=click.IntRange(1, 512), help="Jobs that one worker runs at a time.")(command)


def _size(command: Command) -> Command:
    """What says how many workers it has, and when."""
    hold = click.option(
        "--hold", "hold_seconds", type=click.IntRange(0), help="Seconds without a job until only --min workers stay."
    )
    most = click.option("--max", "max_workers", type=_COUNT, help="At most so many, when it sizes itself.")
    least = click.option("--min", "min_workers", type=_COUNT, help="So many stay however long it is idle.")
    autosize = click.option("--autosize/--no-autosize", default=None, help="Let it size itself by its backlog.")
    return least(most(hold(autosize(command))))


def _metadata(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as wrong:
        raise click.BadParameter(f"is no JSON: {wrong}") from None


@pools.command()
@click.argument("pool_id", required=False)
@click.option("--workers", "desired_workers", type=_COUNT, help="Workers it should have.  [default: 1]")
@_model
@_size
@click.option("--agent", "agent_name", help="Whose pool it is.")
@click.option("--provider", type=click.Choice(["local", "external", "kubernetes"]), help="Who starts its workers.")
@click.option("--metadata", callback=_metadata, metavar="JSON", help="An object that is kept with it.")
@click.option(
    "--wait", "waits", is_flag=True, help="Until it is running, however long; exit 1 if it is closed, or too large."
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), help="Seconds to --wait at most; then exit 1.")
@with_api
@as_json
def create(api: Api, pool_id: str | None, *, waits: bool, timeout_s: float | None, as_json: bool, **fields: Any) -> int:
    """Make a pool, or begin one anew that was stopped or evicted. Asking again for the same is fine."""
    if timeout_s is not None and not waits:
        raise click.UsageError("--timeout needs --wait")
    pool: Pool = api.post("/workers/pool", _given(pool_id=pool_id, **fields))
    if waits:
        _tell_of_waiting(pool, timeout_s)
        pool = _wait(api, pool, PoolState.STARTING, _warming, timeout_s)
    _show(pool, as_json=as_json)
    # Its workers may be there, and grant nothing that it was made for.
    as_wanted = pool["status"] == PoolState.RUNNING and not is_too_large(pool.get("status_reason") or "")
    return REFUSED if waits and not as_wanted else 0


@pools.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=500, show_default=True)
@click.option("--cursor", help="Continue where an earlier page ended.")
@with_api
@as_json
def list_pools(api: Api, *, as_json: bool, **page: Any) -> None:
    """List pools, by id."""
    found = api.get("/workers/pool", page)
    if as_json:
        print_json(found)
        return
    print_table(_LISTED, found["pools"], empty="no pools")
    tell_of_next(found)


@pools.command()
@click.argument("pool_id", shell_complete=completion.pool_ids)
@with_api
@as_json
def show(api: Api, pool_id: str, *, as_json: bool) -> None:
    """Show a pool, where its workers should be, and those it has."""
    pool = api.get(pool_path(pool_id))
    if as_json:
        print_json(pool)
        return
    print_record({key: value for key, value in pool.items() if key not in {"members", "assignments"}})
    for key, columns in (("assignments", _PLACES), ("members", _MEMBERS)):
        click.echo()
        print_table(columns, pool[key], empty=f"no {key}")


@pools.command()
@click.argument("pool_id", shell_complete=completion.pool_ids)
@click.argument("workers", type=_COUNT, required=False)
@_size
@with_api
@as_json
def scale(api: Api, pool_id: str, workers: int | None, *, as_json: bool, **fields: Any) -> None:
    """Have WORKERS workers, or other limits; what is loaded stays loaded."""
    pool = _change(api, pool_id, _given(desired_workers=workers, **fields))
    _show(pool, as_json=as_json)
    if not as_json:
        click.echo(f"{pool['desired_workers']} workers wanted, {pool['spawned_workers']} there{_limits(pool)}")


@pools.command()
@click.argument("pool_id", shell_complete=completion.pool_ids)
@_model
@with_api
@as_json
def swap(api: Api, pool_id: str, *, as_json: bool, **fields: Any) -> None:
    """Serve another model: new workers load it, then the old ones leave. An empty text takes a field away."""
    given = {key: None if value == "" else value for key, value in _given(**fields).items()}
    _show(_change(api, pool_id, given), as_json=as_json)


@pools.command()
@click.argument("pool_id", shell_complete=completion.pool_ids)
@click.option("--timeout", type=click.FloatRange(0), help="Seconds that running jobs get; then they are handed back.")
@click.option("--wait", "waits", is_flag=True, help="Until it is stopped. Ctrl-C leaves it draining.")
@with_api
@as_json
def drain(api: Api, pool_id: str, *, timeout: float | None, waits: bool, as_json: bool) -> None:
    """Start no more jobs of it, let those that run end, and stop its workers."""
    told: Pool = api.post("/control/drain_pool", _given(pool_id=pool_id, timeout_seconds=timeout))
    pool = _wait(api, told, PoolState.DRAINING, _Draining()) if waits else told
    _show(pool, as_json=as_json, already=_already(told))


@pools.command()
@click.argument("pool_id", shell_complete=completion.pool_ids)
@with_api
@as_json
def evict(api: Api, pool_id: str, *, as_json: bool) -> None:
    """End it now; jobs that run are handed back, uncharged."""
    pool: Pool = api.post("/control/evict_pool", {"pool_id": pool_id})
    _show(pool, as_json=as_json, already=_already(pool))


@pools.command()
@click.argument("pool_id", shell_complete=completion.pool_ids)
@with_api
@as_json
def delete(api: Api, pool_id: str, *, as_json: bool) -> None:
    """Forget a pool that is stopped or evicted."""
    answer = api.delete(pool_path(pool_id))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{pool_id} is forgotten")
        if waiting := answer["waiting"]:
            told = f"{waiting} of its jobs still wait: a pool of this name, created again, runs them; or cancel them:"
            click.echo(f"{told} gpuorch jobs list --pool {pool_id} --status pending", err=True)


def _given(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _change(api: Api, pool_id: str, fields: dict[str, Any]) -> Pool:
    if not fields:
        raise click.UsageError("say what should change")
    pool: Pool = api.patch(pool_path(pool_id), fields)
    return pool


def _limits(pool: Pool) -> str:
    bounds = (("at least", pool["min_workers"] or None), ("at most", pool["max_workers"]))
    told = ", ".join(f"{bound} {number}" for bound, number in bounds if number is not None)
    return f" ({told})" if told else ""


def _already(told: Pool) -> bool:
    """Whether it had ended before; a server of an older version does not say."""
    return bool(told.get("already"))


def _show(pool: Pool, *, as_json: bool, already: bool = False) -> None:
    if as_json:
        print_json(pool)
    else:
        why = f"  {printable(pool['status_reason'])}" if pool.get("status_reason") else ""
        click.echo(f"{pool['pool_id']}  {pool['status']}{' already' if already else ''}{why}")


def _tell_of_waiting(pool: Pool, timeout_s: float | None) -> None:
    """It may be for ever: a node that has the handler need not come."""
    if pool["status"] != PoolState.STARTING:
        return
    runs = f"waiting until {pool['pool_id']} is running"
    if timeout_s is None:
        click.echo(f"{runs}; Ctrl-C ends the wait, and --timeout SECONDS would: the pool stays", err=True)
    else:
        click.echo(f"{runs}, {timeout_s:g} s at most; Ctrl-C ends the wait: the pool stays", err=True)


def _wait(
    api: Api, pool: Pool, status: PoolState, how: Callable[[Pool], tuple[float, str]], timeout_s: float | None = None
) -> Pool:
    """The pool once it has left this status, or as it is when the time is over.

    `how` it goes is the share that is done, and a text.
    """
    path = pool_path(pool["pool_id"])
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    try:
        with Progress() as progress:
            while (pool := api.get(path))["status"] == status:
                progress.show(*how(pool), change=(pool["running"], pool["ready_slots"], pool["status_reason"]))
                if time.monotonic() >= deadline:
                    break
                time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        click.echo(f"{pool['pool_id']} goes on {status}; see gpuorch pools show {pool['pool_id']}", err=True)
        raise
    return pool


def _warming(pool: Pool) -> tuple[float, str]:
    share = pool["spawned_workers"] / max(pool["desired_workers"], 1)
    return share, pool["status_reason"] or f"{pool['workers']} workers are starting"


class _Draining:
    """Of the most jobs that were seen running, how many are over."""

    def __init__(self) -> None:
        self._most = 1

    def __call__(self, pool: Pool) -> tuple[float, str]:
        running, oldest, left = pool["running"], pool["oldest_running_seconds"], pool["drain_seconds_left"]
        self._most = max(self._most, running)
        parts = [f"{running} running"]
        parts += [] if oldest is None else [f"oldest {oldest:.0f} s"]
        parts += [] if left is None else [f"handed back in {left:.0f} s"]
        return 1 - running / self._most, ", ".join(parts)
