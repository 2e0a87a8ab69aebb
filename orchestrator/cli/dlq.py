"""`gpuorch dlq …`: look at the jobs that were given up, start them over, forget them. Everything goes over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from orchestrator.cli import REFUSED, completion
from orchestrator.cli.asking import agreed
from orchestrator.cli.http import with_api
from orchestrator.cli.options import Command, JobId, as_json
from orchestrator.cli.output import print_events, print_json, print_record, print_table, printable, tell_of_next
from orchestrator.cli.pages import filled
from orchestrator.client.api import Api
from orchestrator.client.paths import job_path
from orchestrator.client.steps import BULK_S
from orchestrator.errors import NotFound

_LISTED = ("job_id", "type", "agent", "pool_id", "reason", "attempts", "redrives", "buried_at", "last_error")


@click.group()
def dlq() -> None:
    """Dead letters: jobs that were given up."""


def _filtered(command: Command) -> Command:
    """The flags that say which letters are meant."""
    for flag, name, text in (
        ("--reason", "reason", "What ended their last attempt, such as worker_lost or timeout."),
        ("--pool", "pool_id", "Only this pool's."),
        ("--agent", "agent", "Only this agent's."),
        ("--type", "type", "Only this type's."),
    ):
        command = click.option(flag, name, help=text)(command)
    return command


def _bulk(command: Command) -> Command:
    """What commands that change many letters share."""
    command = click.option("--yes", is_flag=True, help="Do not ask.")(command)
    command = click.option(
        "--max", "most", type=click.IntRange(1, 10_000), default=1000, show_default=True, help="At most so many."
    )(command)
    command = click.option("--dry-run", is_flag=True, help="Only tell how many it would be.")(command)
    return _filtered(click.argument("job_ids", nargs=-1, type=JobId(), shell_complete=completion.dead_job_ids)(command))


@dlq.command("list")
@_filtered
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@click.option("--cursor", help="Continue where an earlier page ended.")
@with_api
@as_json
def list_letters(api: Api, *, as_json: bool, **filters: Any) -> None:
    """List dead letters, latest first."""
    page = filled(api, "/dlq", "dead_letters", filters)
    if as_json:
        print_json(page)
        return
    print_table(_LISTED, page["dead_letters"], empty="no dead letters")
    some = "at least " if page.get("at_least") else ""
    click.echo(f"{len(page['dead_letters'])} of {some}{page['total']}", err=True)
    tell_of_next(page)


@dlq.command()
@click.argument("job_id", type=JobId(), shell_complete=completion.dead_job_ids)
@with_api
@as_json
def show(api: Api, job_id: str, *, as_json: bool) -> None:
    """Show a dead letter, its job's record and everything that happened to it."""
    letters = api.get("/dlq", {"job_id": job_id})["dead_letters"]
    job = api.get(job_path(job_id))
    if not letters:
        raise NotFound(f"job {job_id!r} is {job['status']}, not a dead letter; see gpuorch jobs get")
    events = api.get(job_path(job_id, "events"))["events"]
    if as_json:
        print_json({"dead_letter": letters[0], "job": job, "events": events})
        return
    print_record(letters[0])
    click.echo()
    print_record(job)
    click.echo()
    print_events(events)


@dlq.command()
@_bulk
@click.option("--rate", type=click.FloatRange(0.001, 10_000), help="Jobs per second that become due.")
@with_api
@as_json
def redrive(api: Api, *, as_json: bool, rate: float | None, yes: bool, **what: Any) -> int:
    """Start dead letters over: those named by JOB_IDS or by flags, all of them without either."""
    body = _body(**what) | ({} if rate is None else {"rate": rate})
    question = "Start ALL dead letters over?"
    return _change(api, "redrive", "redriven", body, None if yes or body["filter"] else question, as_json=as_json)


@dlq.command()
@_bulk
@with_api
@as_json
def purge(api: Api, *, as_json: bool, yes: bool, **what: Any) -> int:
    """Forget dead letters and their jobs, for good: those named by JOB_IDS or by flags, all without either."""
    body = _body(**what)
    question = f"Forget {'these' if body['filter'] else 'ALL'} dead letters for good?"
    return _change(api, "purge", "purged", body, None if yes else question, as_json=as_json)


def _body(*, job_ids: Sequence[str], dry_run: bool, most: int, **named: str | None) -> dict[str, Any]:
    meant: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    return {"filter": meant | ({"job_ids": list(job_ids)} if job_ids else {}), "dry_run": dry_run, "max": most}


def _change(api: Api, path: str, verb: str, body: dict[str, Any], question: str | None, *, as_json: bool) -> int:
    if question and not body["dry_run"] and not agreed(question):
        return REFUSED
    answer = api.post(f"/dlq/{path}", body, wait_s=BULK_S)
    if as_json:
        print_json(answer)
    else:
        told = {key: value for key, value in answer.items() if key not in {"dry_run", "unknown", verb}}
        print_record(told | _verdict(answer, verb))
    unknown = answer.get("unknown", ())
    for job_id in unknown:
        click.echo(f"gpuorch: {printable(job_id)}: no dead letter{_of_flags(body['filter'])}", err=True)
    return REFUSED if unknown else 0


def _of_flags(meant: dict[str, Any]) -> str:
    return " that the flags mean" if len(meant) > 1 else ""


def _verdict(answer: dict[str, Any], verb: str) -> dict[str, Any]:
    return {verb: "none, this was a dry run" if answer["dry_run"] else answer[verb]}
