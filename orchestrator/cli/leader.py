"""`gpuorch leader` and `gpuorch duty`: who leads, and a duty done by hand, from the database directly."""

from __future__ import annotations

import click

from orchestrator import actors
from orchestrator.cli.options import as_json, with_settings
from orchestrator.cli.output import print_json, print_record
from orchestrator.cli.schema import opened, require_schema
from orchestrator.config import Loaded
from orchestrator.embedded.directory import beside_holder, require_redis_of_holder
from orchestrator.errors import UnknownDuty
from orchestrator.identity import instance_id
from orchestrator.leader import duties, term
from orchestrator.leader.context import DutyContext
from orchestrator.leader.duties import DUTIES, Duty
from orchestrator.publisher import Publisher
from orchestrator.store import audit, leadership
from orchestrator.stream.hub import Hub


@click.command()
@with_settings("database_url")
@as_json
def leader(loaded: Loaded, *, as_json: bool) -> None:
    """Show who leads."""
    with opened(loaded.settings) as db:
        require_schema(db)
        now = db.read(lambda conn: leadership.current(conn, loaded.settings.leader_lock))
    if as_json:
        print_json(now)
    elif now.alive:
        print_record({"holder": now.holder, "epoch": now.epoch, "expires_at": f"{now.expires_at} UTC"})
    else:
        click.echo(f"nobody leads (last epoch: {now.epoch})")


@click.command()
@click.argument(
    "name",
    metavar=f"[{'|'.join(duty.name for duty in DUTIES)}]",
    shell_complete=lambda *given: [duty.name for duty in DUTIES if duty.name.startswith(given[2])],
)
@with_settings("database_url", "redis_url")
@click.option("--once", is_flag=True, required=True, help="Run it once, now.")
@as_json
def duty(loaded: Loaded, name: str, *, once: bool, as_json: bool) -> None:
    """Do one of the leader's duties now, in the leader's term or, when nobody leads, in a short one."""
    found, settings = _known(name), beside_holder(loaded)
    require_redis_of_holder(settings)
    hub = Hub(settings)
    with opened(settings) as db:
        require_schema(db)
        publisher = Publisher(db, hub, settings)
        with actors.acting(actors.of_user()):
            mine = term.borrow(db, settings, instance_id())
        # Before it runs: one that breaks half-way has changed something, too.
        db.write(lambda conn: audit.record(conn, [audit.Event("duty.run", actor=mine.actor, details={"duty": name})]))
        count = found.run(DutyContext(mine, hub, publisher, settings))
    hub.close()
    if as_json:
        print_json({"duty": name, "count": count, "epoch": mine.epoch})
    else:
        click.echo(f"{name}: {count} done (epoch {mine.epoch})")


def _known(name: str) -> Duty:
    try:
        return duties.find(name)
    except UnknownDuty as unknown:
        raise click.UsageError(str(unknown), click.get_current_context()) from None
