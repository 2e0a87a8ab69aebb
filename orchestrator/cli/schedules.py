"""`gpuorch schedules …`: jobs that come again and again. Everything goes over HTTP."""

from __future__ import annotations

from typing import Any

import click

from orchestrator.cli import completion
from orchestrator.cli.describing import with_job
from orchestrator.cli.http import with_api
from orchestrator.cli.options import as_json
from orchestrator.cli.output import print_json, print_record, print_table, tell_of_next
from orchestrator.client.api import Api
from orchestrator.client.paths import schedule_path
from orchestrator.schedules import NOT_RECURRING

_LISTED = ("schedule_id", "cron", "every_seconds", "timezone", "enabled", "next_fire_at", "last_fired_at", "last_error")


@click.group()
def schedules() -> None:
    """Jobs that come again and again: by a cron line, or every so often."""


@schedules.command("list")
@click.option("--limit", type=click.IntRange(1, 500), default=100, show_default=True)
@click.option("--cursor", help="Continue where an earlier page ended.")
@with_api
@as_json
def list_schedules(api: Api, *, as_json: bool, **page: Any) -> None:
    """List schedules, by id."""
    found = api.get("/schedules", page)
    if as_json:
        print_json(found)
        return
    print_table(_LISTED, found["schedules"], empty="no schedules")
    tell_of_next(found)


@schedules.command()
@click.argument("schedule_id", shell_complete=completion.schedule_ids)
@with_api
@as_json
def show(api: Api, schedule_id: str, *, as_json: bool) -> None:
    """Show a schedule: its job, when it fires next, and why the last time there was none."""
    _show(api.get(schedule_path(schedule_id)), as_json=as_json)


@schedules.command("set")
@click.argument("schedule_id", shell_complete=completion.schedule_ids)
@click.option("--cron", metavar="LINE", help='Minute, hour, day, month, weekday: "0 3 * * MON-FRI".')
@click.option("--every", "every_seconds", type=click.FloatRange(1), metavar="SECONDS", help="Instead of a cron line.")
@click.option("--timezone", help="Whose clock the cron line means: Europe/Berlin.  [default: UTC]")
@with_job(without=NOT_RECURRING)
@click.option("--catch-up", type=click.Choice(["skip", "last", "all"]), help="What runs of missed times.")
@click.option("--catch-up-max", type=click.IntRange(1, 100), help="With all: at most so many.  [default: 10]")
@click.option("--disabled", is_flag=True, help="Keep it, but do not fire it.")
@with_api
@as_json
def set_schedule(
    api: Api, schedule_id: str, *, job: dict[str, Any], as_json: bool, disabled: bool, **given: Any
) -> None:
    """Make or replace a schedule that submits a job of TYPE."""
    given = {key: value for key, value in given.items() if value is not None}
    _show(api.put(schedule_path(schedule_id), given | {"job": job, "enabled": not disabled}), as_json=as_json)


@schedules.command()
@click.argument("schedule_id", shell_complete=completion.schedule_ids)
@with_api
@as_json
def delete(api: Api, schedule_id: str, *, as_json: bool) -> None:
    """Forget a schedule; jobs that it made stay."""
    answer = api.delete(schedule_path(schedule_id))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{schedule_id} is deleted")


@schedules.command()
@click.argument("schedule_id", shell_complete=completion.schedule_ids)
@with_api
@as_json
def fire(api: Api, schedule_id: str, *, as_json: bool) -> None:
    """Submit its job now, once; its next time stays what it is."""
    answer = api.post(schedule_path(schedule_id, "fire"))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['job_id']}  {answer['status']}")


def _show(schedule: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(schedule)
    else:
        print_record(schedule)
