"""`gpuorch jobs …`: submit, look, wait, explain, cancel, start over, move. Everything goes over HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from orchestrator.cli import completion
from orchestrator.cli.http import with_api
from orchestrator.cli.importing import import_jobs
from orchestrator.cli.options import as_json
from orchestrator.cli.output import print_events, print_json, print_record, print_table, tell_of_next
from orchestrator.client.answers import Job
from orchestrator.client.api import Api
from orchestrator.client.clients import PATIENCE_S
from orchestrator.client.errors import NotEnded
from orchestrator.client.nouns import JobsOf
from orchestrator.client.paths import job_path
from orchestrator.client.submitting import Submitting
from orchestrator.jobs import TERMINAL, Status

_LISTED = ("job_id", "type", "status", "agent", "pool_id", "priority", "attempts", "created_at", "last_error")


@click.group()
def jobs() -> None:
    """Submit jobs, look at them, wait for them, cancel them or start them over."""


jobs.add_command(import_jobs)


@jobs.command()
@click.argument("type")
@click.option("--payload", default="{}", metavar="JSON|@FILE|-", help="An object; - reads standard input.")
@click.option("--job-id", help="Makes repeating this safe: the same id and content is one job.")
@click.option("--agent", help="On whose behalf.")
@click.option("--pool", "pool_id", shell_complete=completion.pool_ids, help="Pool whose workers run it.")
@click.option("--priority", help="LOW, NORMAL, HIGH or -100…100; larger runs earlier.")
@click.option(
    "--cost-units", type=float, help="What it costs of its agent's share, 0…100; by default as long as it takes."
)
@click.option("--min-memory-mb", type=int, help="GPU memory it needs.")
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(0),
    default=60,
    show_default=True,
    help="Seconds to wait when the server says to come again later.",
)
@with_api
@as_json
def submit(api: Api, *, as_json: bool, payload: str, priority: str | None, patience_s: float, **fields: Any) -> None:
    """Submit a job of TYPE and print its id."""
    body = {key: value for key, value in fields.items() if value is not None}
    body |= {"payload": read_payload(payload)} | ({} if priority is None else {"priority": named_priority(priority)})
    answer = Submitting(api, patience_s, lambda reason: click.echo(f"waiting: {reason}", err=True)).one(body)
    if as_json:
        print_json(answer)
    else:
        known = "" if answer.get("created", True) else " (was submitted before)"
        click.echo(f"{answer['job_id']}  {answer['status']}{known}")


@jobs.command()
@click.argument("job_id", shell_complete=completion.job_ids)
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=0, help="Seconds to wait for its end.")
@with_api
@as_json
def get(api: Api, job_id: str, *, wait_s: float, as_json: bool) -> None:
    """Show everything about a job."""
    _show(_waited(api, job_id, wait_s), as_json=as_json)


@jobs.command()
@click.argument("job_id", shell_complete=completion.job_ids)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), help="Give up after so many seconds (exit 1).")
@with_api
@as_json
def wait(api: Api, job_id: str, *, timeout_s: float | None, as_json: bool) -> int:
    """Wait until a job has ended; exit 0 when it is done or skipped, 1 otherwise."""
    job = _waited(api, job_id, timeout_s)
    _show(job, as_json=as_json)
    if job["status"] not in TERMINAL:
        click.echo(f"gpuorch: {job_id} has not ended within {timeout_s or 0:g} s; it goes on", err=True)
    return 0 if job["status"] in {Status.DONE, Status.SKIPPED} else 1


@jobs.command("list")
@click.option("--status", type=click.Choice([status.value for status in Status]))
@click.option("--agent")
@click.option("--pool", "pool_id", shell_complete=completion.pool_ids)
@click.option("--type", "type")
@click.option("--workflow", "workflow_id", shell_complete=completion.workflow_ids, help="Tasks of this workflow.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@click.option("--cursor", help="Continue where an earlier page ended.")
@with_api
@as_json
def list_jobs(api: Api, *, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first."""
    page = api.get("/jobs", filters)
    if as_json:
        print_json(page)
        return
    print_table(_LISTED, page["jobs"], empty="no jobs")
    tell_of_next(page)


@jobs.command()
@click.argument("job_id", shell_complete=completion.job_ids)
@with_api
@as_json
def events(api: Api, job_id: str, *, as_json: bool) -> None:
    """Show what happened to a job, oldest first."""
    answer = api.get(job_path(job_id, "events"))
    if as_json:
        print_json(answer)
    else:
        print_events(answer["events"])


@jobs.command()
@click.argument("job_id", shell_complete=completion.job_ids)
@with_api
@as_json
def explain(api: Api, job_id: str, *, as_json: bool) -> None:
    """Say why a job does not run, what that rests on, its place in line and when it may start."""
    answer = api.get(job_path(job_id, "explain"))
    if as_json:
        print_json(answer)
        return
    click.echo(f"{answer['job_id']}  {answer['status']}  {answer['reason']}\n{answer['message']}")
    if answer["position"]:
        least = "at least " if answer["position_is_at_least"] else ""
        click.echo(f"position {least}{answer['position']}")
    if answer["estimated_start_in_seconds"] is not None:
        click.echo(f"starts in about {answer['estimated_start_in_seconds']:.0f} s")
    evidence = answer["evidence"]
    for title in ("caps", "workers", "gpus"):
        if evidence[title]:
            click.echo(f"\n{title}")
            print_table(list(evidence[title][0]), evidence[title])


@jobs.command()
@click.argument("job_id", shell_complete=completion.job_ids)
@with_api
@as_json
def cancel(api: Api, job_id: str, *, as_json: bool) -> None:
    """Cancel a job: at once when it waits; when it runs, its worker is asked to stop it."""
    answer = api.post(job_path(job_id, "cancel"))
    if as_json:
        print_json(answer)
    else:
        asked = "" if answer["status"] == Status.CANCELLED else " (its worker was asked to stop it)"
        click.echo(f"{answer['job_id']}  {answer['status']}{asked}")


@jobs.command()
@click.argument("job_id", shell_complete=completion.job_ids)
@with_api
@as_json
def retry(api: Api, job_id: str, *, as_json: bool) -> None:
    """Start a failed, cancelled or dead-lettered job over."""
    answer = api.post(job_path(job_id, "retry"))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['job_id']}  {answer['status']}")


@jobs.command(context_settings={"ignore_unknown_options": True})
@click.argument("job_id", shell_complete=completion.job_ids)
@click.argument("priority", metavar="LOW|NORMAL|HIGH|-100…100")
@with_api
@as_json
def priority(api: Api, job_id: str, priority: str, *, as_json: bool) -> None:
    """Let a waiting job run earlier or later: larger runs earlier."""
    answer = api.post(job_path(job_id, "priority"), {"priority": named_priority(priority)})
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['job_id']}  {answer['status']}  priority {answer['before']} → {answer['priority']}")


def _waited(api: Api, job_id: str, timeout_s: float | None) -> Job:
    """The job once it has ended, or as it is when the time is over. A server that restarts meanwhile is waited for."""
    found = JobsOf(api, PATIENCE_S)
    try:
        return found.get(job_id) if timeout_s == 0 else found.wait(job_id, timeout_s)
    except NotEnded:
        return found.get(job_id)


def _show(job: Job, *, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        print_record(job)


def read_payload(text: str) -> object:
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise click.BadParameter(f"{error.filename}: {error.strerror}", param_hint="--payload") from None
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--payload") from None


def named_priority(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        return text.upper()
