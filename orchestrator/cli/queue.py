"""`gpuorch queue …`: how much waits, what is paused, and what the gates see. Everything goes over HTTP."""

from __future__ import annotations

from typing import Any

import click

from orchestrator.cli.http import with_api
from orchestrator.cli.options import Command, as_json
from orchestrator.cli.output import print_json, print_record, print_table, printable
from orchestrator.client.api import Api

_UNFINISHED = ("pending", "claimed", "running")


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
    """Count jobs by status, and those that are not over by pool and agent; a + means at least so many."""
    found = api.get("/jobs/stats")
    if as_json:
        print_json(found)
        return
    more = set(found["at_least"])
    print_record({status: f"{count}{'+' if status in more else ''}" for status, count in found["status"].items()})
    oldest = found["oldest_pending_seconds"]
    click.echo(f"oldest pending: {'-' if oldest is None else f'{oldest:.0f} s'}")
    for key in ("pools", "agents"):
        click.echo()
        name = key.removesuffix("s")
        rows = [{name: label} | counts for label, counts in found[key].items()]
        print_table((name, *_UNFINISHED), rows, empty=f"no {key} with jobs")


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
        print_table(("key", "action", "reason", "since"), answer["paused"], empty="nothing is paused")


@queue.command()
@with_api
@as_json
def gates(api: Api, *, as_json: bool) -> None:
    """Show what the leader saw at the gates, and which are closed."""
    answer = api.get("/control/gates")
    if as_json:
        print_json(answer)
    else:
        print_table(("name", "closed", "reason", "looked_at"), answer["gates"], empty="no gates")
