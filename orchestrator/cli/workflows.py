"""`gpuorch workflows …`: tasks that wait for one another. Everything goes over HTTP."""

from __future__ import annotations

import json
from typing import IO, Any

import click

from orchestrator.cli import completion
from orchestrator.cli.http import with_api
from orchestrator.cli.options import as_json
from orchestrator.cli.output import print_events, print_json, print_record, print_table, tell_of_next
from orchestrator.cli.pages import filled
from orchestrator.client.api import Api
from orchestrator.client.paths import workflow_path
from orchestrator.workflows import FlowStatus

_LISTED = ("workflow_id", "name", "status", "completed", "total", "failed", "agent", "created_at", "reason")
_TASKS = ("name", "job_id", "type", "status", "depends_on", "attempts", "last_error")


@click.group()
def workflows() -> None:
    """Tasks that wait for one another: create, look, cancel, start over."""


@workflows.command()
@click.argument("file", type=click.File("rb"))
@with_api
@as_json
def create(api: Api, file: IO[bytes], *, as_json: bool) -> None:
    """Create the workflow that FILE describes as JSON (- reads standard input), and print its id."""
    answer = api.post("/workflows", _document(file))
    if as_json:
        print_json(answer)
        return
    known = "" if answer["created"] else " (was created before)"
    click.echo(f"{answer['workflow_id']}  {answer['status']}{known}")


@workflows.command()
@click.argument("workflow_id", shell_complete=completion.workflow_ids)
@click.argument("file", type=click.File("rb"))
@with_api
@as_json
def add(api: Api, workflow_id: str, file: IO[bytes], *, as_json: bool) -> None:
    """Add the tasks of FILE, {"tasks": […]}, to a workflow that runs."""
    answer = api.post(workflow_path(workflow_id, "tasks"), _document(file))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{workflow_id}  added {', '.join(answer['added']) or 'nothing'}")


@workflows.command("list")
@click.option("--status", type=click.Choice([status.value for status in FlowStatus]))
@click.option("--agent")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@click.option("--cursor", help="Continue where an earlier page ended.")
@with_api
@as_json
def list_workflows(api: Api, *, as_json: bool, **filters: Any) -> None:
    """List workflows, newest first."""
    page = filled(api, "/workflows", "workflows", filters)
    if as_json:
        print_json(page)
        return
    print_table(_LISTED, [one | one["progress"] for one in page["workflows"]], empty="no workflows")
    tell_of_next(page)


@workflows.command()
@click.argument("workflow_id", shell_complete=completion.workflow_ids)
@click.option("--limit", type=click.IntRange(1, 500), default=100, show_default=True, help="Tasks to a page.")
@click.option("--cursor", help="Continue where an earlier page of tasks ended.")
@with_api
@as_json
def show(api: Api, workflow_id: str, *, as_json: bool, **page: Any) -> None:
    """Show a workflow: how far it is, and its tasks."""
    _show(api.get(workflow_path(workflow_id), page), as_json=as_json)


@workflows.command()
@click.argument("workflow_id", shell_complete=completion.workflow_ids)
@with_api
@as_json
def events(api: Api, workflow_id: str, *, as_json: bool) -> None:
    """Show what happened to a workflow, oldest first."""
    answer = api.get(workflow_path(workflow_id, "events"))
    if as_json:
        print_json(answer)
    else:
        print_events(answer["events"])


@workflows.command()
@click.argument("workflow_id", shell_complete=completion.workflow_ids)
@with_api
@as_json
def cancel(api: Api, workflow_id: str, *, as_json: bool) -> None:
    """End its waiting tasks and stop those that run."""
    answer = api.post(workflow_path(workflow_id, "cancel"))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{workflow_id}  {answer['status']}")


@workflows.command("retry-failed")
@click.argument("workflow_id", shell_complete=completion.workflow_ids)
@with_api
@as_json
def retry_failed(api: Api, workflow_id: str, *, as_json: bool) -> None:
    """Start its failed and cancelled tasks over; what is done stays."""
    _show(api.post(workflow_path(workflow_id, "retry_failed")), as_json=as_json)


@workflows.command()
@click.argument("workflow_id", shell_complete=completion.workflow_ids)
@click.argument("task")
@with_api
@as_json
def rerun(api: Api, workflow_id: str, task: str, *, as_json: bool) -> None:
    """Run TASK again with all that needs it."""
    _show(api.post(workflow_path(workflow_id, "rerun"), {"task": task}), as_json=as_json)


def _document(file: IO[bytes]) -> dict[str, Any]:
    try:
        found = json.loads(file.read())
    except ValueError as wrong:
        raise click.BadParameter(f"not JSON: {wrong}", param_hint="FILE") from None
    if not isinstance(found, dict):
        raise click.BadParameter("not a JSON object", param_hint="FILE")
    return found


def _show(workflow: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(workflow)
        return
    about = {key: value for key, value in workflow.items() if key not in ("tasks", "next_cursor")}
    print_record(about | {"progress": _progress(workflow["progress"])})
    click.echo()
    print_table(_TASKS, workflow["tasks"], empty="no tasks")
    tell_of_next(workflow)


def _progress(counts: dict[str, int]) -> str:
    """How many tasks ended, and how: what failed is what somebody looks for."""
    how = [f"{counts[name]} {name}" for name in ("done", "failed", "cancelled") if counts[name]]
    return f"{counts['completed']} of {counts['total']}" + (f" ({', '.join(how)})" if how else "")
