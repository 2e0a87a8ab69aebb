"""`gpuorch jobs …`: submit, look, wait, explain, cancel, start over, move. Everything goes over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from orchestrator.cli import REFUSED, completion
from orchestrator.cli.describing import named_priority, with_job
from orchestrator.cli.http import with_api
from orchestrator.cli.importing import import_jobs
from orchestrator.cli.options import JobId, as_json
from orchestrator.cli.output import print_events, print_json, print_record, print_table, printable, tell_of_next
from orchestrator.cli.pages import filled
from orchestrator.client.answers import Job
from orchestrator.client.api import Api
from orchestrator.client.clients import PATIENCE_S
from orchestrator.client.errors import NotEnded, Refused
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
@with_job()
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(0),
    default=60,
    show_default=True,
    help="Seconds to wait when the server says to come again later.",
)
@click.option("--wait", "waits", is_flag=True, help="Until it has ended, with the exit codes of jobs wait.")
@with_api
@as_json
def submit(api: Api, *, job: dict[str, Any], patience_s: float, waits: bool, as_json: bool) -> int:
    """Submit a job of TYPE and print its id."""
    limit = f"trying for up to {patience_s:g} s (--patience)"
    answer = Submitting(api, patience_s, lambda reason: _tell_why(f"{reason}; {limit}")).one(job)
    if not as_json:
        known = "" if answer.get("created", True) else " (was submitted before)"
        click.echo(f"{answer['job_id']}  {answer['status']}{known}")
    elif waits:
        click.echo(answer["job_id"], err=True)  # for whoever does not wait to the end
    else:
        print_json(answer)
    return _wait_and_show(api, answer["job_id"], None, as_json=as_json) if waits else 0


@jobs.command()
@click.argument("job_id", type=JobId(), shell_complete=completion.job_ids)
@click.option("--wait", "wait_s", type=click.FloatRange(0), default=0, help="Seconds to wait for its end.")
@with_api
@as_json
def get(api: Api, job_id: str, *, wait_s: float, as_json: bool) -> None:
    """Show everything about a job."""
    _show(_waited(api, job_id, wait_s), as_json=as_json)


@jobs.command()
@click.argument("job_id", type=JobId(), shell_complete=completion.job_ids)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), help="Give up after so many seconds (exit 1).")
@with_api
@as_json
def wait(api: Api, job_id: str, *, timeout_s: float | None, as_json: bool) -> int:
    """Wait until a job has ended; exit 0 when it is done or skipped, 1 otherwise."""
    return _wait_and_show(api, job_id, timeout_s, as_json=as_json)


@jobs.command("list")
@click.option("--status", type=click.Choice([status.value for status in Status]))
@click.option("--agent")
@click.option("--pool", "pool_id", shell_complete=completion.pool_ids)
@click.option("--type", "type")
@click.option("--workflow", "workflow_id", shell_complete=completion.workflow_ids, help="Tasks of this workflow.")
@click.option("--tag", help="Those with this tag, exactly as it was submitted.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@click.option("--cursor", help="Continue where an earlier page ended.")
@with_api
@as_json
def list_jobs(api: Api, *, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first."""
    page = filled(api, "/jobs", "jobs", filters)
    if as_json:
        print_json(page)
        return
    print_table(_LISTED, page["jobs"], empty="no jobs")
    tell_of_next(page)


@jobs.command()
@click.argument("job_id", type=JobId(), shell_complete=completion.job_ids)
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
@click.argument("job_id", type=JobId(), shell_complete=completion.job_ids)
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
@click.argument("job_ids", metavar="JOB_ID…", nargs=-1, required=True, type=JobId(), shell_complete=completion.job_ids)
@with_api
@as_json
def cancel(api: Api, job_ids: Sequence[str], *, as_json: bool) -> int:
    """Cancel jobs: at once those that wait; of those that run, the worker is asked to stop them."""
    return _each(api, job_ids, "cancel", _cancelled, as_json=as_json)


@jobs.command()
@click.argument("job_ids", metavar="JOB_ID…", nargs=-1, required=True, type=JobId(), shell_complete=completion.job_ids)
@with_api
@as_json
def retry(api: Api, job_ids: Sequence[str], *, as_json: bool) -> int:
    """Start failed, cancelled or dead-lettered jobs over."""
    return _each(api, job_ids, "retry", _line, as_json=as_json)


@jobs.command(context_settings={"ignore_unknown_options": True})
@click.argument("job_id", type=JobId(), shell_complete=completion.job_ids)
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


def _each(api: Api, job_ids: Sequence[str], what: str, told: Callable[[dict[str, Any]], str], *, as_json: bool) -> int:
    """Ask it of each; a refusal stops none of the others, and makes the exit code 1."""
    if len(job_ids) == 1:
        answer = api.post(job_path(job_ids[0], what))
        if as_json:
            print_json(answer)
        else:
            click.echo(told(answer))
        return 0
    verdicts: list[dict[str, Any]] = []
    try:
        for job_id in dict.fromkeys(job_ids):
            verdicts.append(_verdict(api, job_id, what))
            if not as_json:
                _tell(verdicts[-1], told)
    finally:  # a server that goes away meanwhile has done those before
        if as_json:
            print_json({"jobs": verdicts})
    return REFUSED if any("error" in verdict for verdict in verdicts) else 0


def _verdict(api: Api, job_id: str, what: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = api.post(job_path(job_id, what))
    except Refused as refused:
        return {
            "job_id": job_id,
            "error": {"status": refused.status, "code": refused.code, "detail": refused.detail},
        }
    return answer


def _tell(verdict: dict[str, Any], told: Callable[[dict[str, Any]], str]) -> None:
    if error := verdict.get("error"):
        click.echo(f"gpuorch: {verdict['job_id']}: {error['status']} {error['code']}: {error['detail']}", err=True)
    else:
        click.echo(told(verdict))


def _line(answer: dict[str, Any]) -> str:
    return f"{answer['job_id']}  {answer['status']}"


def _cancelled(answer: dict[str, Any]) -> str:
    return _line(answer) + ("" if answer["status"] == Status.CANCELLED else " (its worker was asked to stop it)")


def _wait_and_show(api: Api, job_id: str, timeout_s: float | None, *, as_json: bool) -> int:
    """The exit code: 0 when it is done or skipped."""
    job = _waited(api, job_id, timeout_s)
    _show(job, as_json=as_json)
    if job["status"] not in TERMINAL:
        click.echo(f"gpuorch: {job_id} has not ended within {timeout_s or 0:g} s; it goes on", err=True)
    return 0 if job["status"] in {Status.DONE, Status.SKIPPED} else 1


def _waited(api: Api, job_id: str, timeout_s: float | None) -> Job:
    """The job once it has ended, or as it is when the time is over. A server that restarts meanwhile is waited for."""
    found = JobsOf(api, PATIENCE_S)
    try:
        return found.get(job_id) if timeout_s == 0 else found.wait(job_id, timeout_s, on_wait=_tell_why)
    except NotEnded:
        return found.get(job_id)


def _tell_why(reason: str) -> None:
    click.echo(f"waiting: {printable(reason)}", err=True)


def _show(job: Job, *, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        print_record(job)
