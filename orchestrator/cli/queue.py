"""`gpuorch queue …`: how much waits, what is paused, what the gates see, what failed; and a worker for it here.

Everything but the worker goes over HTTP.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import click

from orchestrator.cli import REFUSED, completion
from orchestrator.cli.asking import agreed
from orchestrator.cli.http import with_api
from orchestrator.cli.options import OF_WORKERS, Command, as_json, with_settings
from orchestrator.cli.output import print_json, print_record, print_table, printable
from orchestrator.cli.progress import duration
from orchestrator.client.api import Api
from orchestrator.client.steps import BULK_S
from orchestrator.config import Loaded
from orchestrator.errors import ConfigError
from orchestrator.settings import database_file

_UNFINISHED = ("pending", "claimed", "running")
_PAUSED = ("action", "reason", "since")


@click.group()
def queue() -> None:
    """The queue: what waits, what is paused."""


def _scoped(command: Command) -> Command:
    """What is meant: all jobs, or those of one pool, agent or type."""
    for flag, text in (("--type", "type"), ("--agent", "agent"), ("--pool", "pool")):
        command = click.option(flag, help=f"Only jobs of this {text}.")(command)
    return command


def _scope(**names: str | None) -> dict[str, Any]:
    given = {scope: name for scope, name in names.items() if name is not None}
    if len(given) > 1:
        raise click.UsageError("name one of --pool, --agent and --type, or none of them for all jobs")
    return next(({"scope": scope, "name": name} for scope, name in given.items()), {"scope": "all"})


@queue.command()
@with_api
@as_json
def stats(api: Api, *, as_json: bool) -> None:
    """Count jobs by status, and those that are not over by pool and agent; a + means at least so many.

    And tell what is paused: it explains why things wait.
    """
    found = api.get("/jobs/stats") | api.get("/control/paused")
    if as_json:
        print_json(found)
        return
    more = set(found["at_least"])
    print_record({status: f"{count}{'+' if status in more else ''}" for status, count in found["status"].items()})
    oldest = found["oldest_pending_seconds"]
    click.echo(f"oldest pending: {'-' if oldest is None else duration(oldest)}")
    if found["paused"]:
        click.echo()
        print_table(("paused", *_PAUSED), [{"paused": one["key"]} | one for one in found["paused"]])
    for key in ("pools", "agents"):
        click.echo()
        name = key.removesuffix("s")
        rows = [{name: label} | counts | _oldest(counts) for label, counts in found[key].items()]
        print_table((name, *_UNFINISHED, "oldest"), rows, empty=f"no {key} with jobs")


def _oldest(counts: dict[str, Any]) -> dict[str, str | None]:
    seconds = counts.get("oldest_pending_seconds")
    return {"oldest": None if seconds is None else duration(seconds)}


@queue.command()
@_scoped
@click.option("--reason", help="Why, for those who ask.")
@click.option("--keep", is_flag=True, help="Take submits and keep them, instead of refusing them.")
@with_api
@as_json
def pause(api: Api, *, reason: str | None, keep: bool, as_json: bool, **names: str | None) -> None:
    """Start no more jobs, of all or of one pool, agent or type. What runs goes on."""
    body = _scope(**names) | ({} if reason is None else {"reason": reason}) | ({"action": "queue"} if keep else {})
    answer = api.post("/control/pause", body)
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['key']} is paused; submits are {'kept' if keep else 'refused'}")


@queue.command()
@_scoped
@with_api
@as_json
def resume(api: Api, *, as_json: bool, **names: str | None) -> None:
    """Start jobs again."""
    answer = api.post("/control/resume", _scope(**names))
    if as_json:
        print_json(answer)
        return
    click.echo(f"{answer['key']} {'is resumed' if answer['was_paused'] else 'was not paused'}")
    if answer["still_paused"]:
        click.echo(f"still paused: {printable(', '.join(answer['still_paused']))}", err=True)


@queue.command()
@with_api
@as_json
def paused(api: Api, *, as_json: bool) -> None:
    """List what is paused."""
    answer = api.get("/control/paused")
    if as_json:
        print_json(answer)
    else:
        print_table(("key", *_PAUSED), answer["paused"], empty="nothing is paused")


#: The lanes are counted by whoever lets jobs in, when it does.
NO_GATES = "no gates that the leader looks at; queue_depth is counted at each submit: gpuorch policy get admission"


@queue.command()
@with_api
@as_json
def gates(api: Api, *, as_json: bool) -> None:
    """Show what the leader saw at the gates, and which are closed."""
    answer = api.get("/control/gates")
    if as_json:
        print_json(answer)
    else:
        print_table(("name", "closed", "reason", "looked_at"), answer["gates"], empty=NO_GATES)


@queue.command("retry-failed")
@click.option("--status", type=click.Choice(["failed", "dead_letter"]), help="Only these; by default both.")
@click.option("--type", "type", help="Only jobs of this type.")
@click.option("--agent", help="Only jobs of this agent.")
@click.option("--pool", "pool_id", shell_complete=completion.pool_ids, help="Only jobs of this pool.")
@click.option("--error", "error_kind", help="What ended their last attempt, such as timeout or permanent.")
@click.option("--dry-run", is_flag=True, help="Only tell how many it would be.")
@click.option(
    "--max",
    "most",
    type=click.IntRange(1, 10_000),
    default=1000,
    show_default=True,
    help="At most so many, oldest first.",
)
@click.option("--rate", type=click.FloatRange(0.001, 10_000), help="Jobs per second that become due.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_api
@as_json
def retry_failed(
    api: Api, *, as_json: bool, dry_run: bool, most: int, rate: float | None, yes: bool, **named: str | None
) -> int:
    """Start over what failed or is a dead letter, with its attempts uncharged."""
    meant = {key: value for key, value in named.items() if value is not None}
    if not (meant or dry_run or yes) and not agreed("Start ALL failed jobs over?"):
        return REFUSED
    body = {"filter": meant, "dry_run": dry_run, "max": most} | ({} if rate is None else {"rate": rate})
    answer = api.post("/jobs/retry_failed", body, wait_s=BULK_S)
    if as_json:
        print_json(answer)
    elif dry_run:
        click.echo(
            f"{answer['would_be']} would be started over, of {answer['matched']} that failed; this was a dry run"
        )
    else:
        click.echo(f"{answer['redriven']} started over, of {answer['matched']} that failed")
    if answer["exhausted"]:
        click.echo(f"{answer['exhausted']} were started over as often as allowed (redrive_max); they stay", err=True)
    return 0


@queue.command("run")
@click.option("--drain", is_flag=True, help="Exit when nothing of the lane waits or runs any more.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), help="Give up after so many seconds (exit 1).")
@with_settings(*OF_WORKERS)
@as_json
def run_queue(loaded: Loaded, *, drain: bool, timeout_s: float | None, as_json: bool) -> int:
    """Run a worker here, with a progress bar; --drain ends it when its lane is empty.

    It needs the database and Redis, nothing else: retries and delayed jobs come due by its own doing when nobody else
    leads. Without a --database-url and a --redis-url it works on --data-dir, as gpuorch dev does.
    """
    from orchestrator.cli.dev import own_servers
    from orchestrator.cli.draining import run_here
    from orchestrator.cli.servers import stop_on_sigterm
    from orchestrator.modules import require_modules
    from orchestrator.telemetry import logs

    require_modules(loaded.settings.worker_handlers)
    stop_on_sigterm()
    with ExitStack() as servers:
        settings = loaded.settings
        if loaded.nobody_gave("database_url", "redis_url"):
            if not (file := database_file(settings.data_dir)).exists():
                ways = "name the --data-dir of a gpuorch dev, or a --database-url and a --redis-url"
                raise ConfigError(f"there is nothing to run: no database is at {file.absolute()}; {ways}")
            settings = servers.enter_context(own_servers(loaded))
        else:
            logs.configure(settings)
        return run_here(settings, drain=drain, timeout_s=timeout_s, as_json=as_json)
