"""`gpuorch leases`, `workers` and `gpus`: what is alive, what it has, who holds it."""

from __future__ import annotations

from typing import Any

import click

from orchestrator.cli import completion
from orchestrator.cli.bars import print_gpus
from orchestrator.cli.http import with_api
from orchestrator.cli.options import as_json
from orchestrator.cli.output import print_json, print_table
from orchestrator.cli.pages import whole
from orchestrator.client.api import Api
from orchestrator.client.paths import gpu_path, lease_path

_LEASES = ("agent_name", "mode", "node_id", "gpus", "memory_mb", "job_id", "worker_id", "expires_at")
_WORKERS = (
    "worker_id",
    "kind",
    "pool_id",
    "status",
    "slots",
    "busy",
    "trouble",
    "jobs_done",
    "jobs_failed",
    "heartbeat_age_seconds",
    "version",
)


@click.group()
def leases() -> None:
    """GPU leases: who holds memory on which GPU."""


@leases.command("list")
@with_api
@as_json
def list_leases(api: Api, *, as_json: bool) -> None:
    """List live leases, oldest first, with the indexes of their GPUs; memory_mb is that of each."""
    answer = whole(api, "/leases", "leases")
    if as_json:
        print_json(answer)
    else:
        print_table(_LEASES, [lease | _indexes(lease) for lease in answer["leases"]], empty="no leases")


@leases.command()
@click.argument("token")
@with_api
@as_json
def release(api: Api, token: str, *, as_json: bool) -> None:
    """Release a lease by its secret TOKEN; its memory returns when its processes are gone."""
    answer = api.post(lease_path(token, "release"))
    if as_json:
        print_json(answer)
    else:
        click.echo("released")


@click.group()
def workers() -> None:
    """Workers: the processes that run jobs."""


@workers.command("list")
@with_api
@as_json
def list_workers(api: Api, *, as_json: bool) -> None:
    """List workers."""
    answer = whole(api, "/workers", "workers")
    if as_json:
        print_json(answer)
    else:
        print_table(_WORKERS, answer["workers"], empty="no workers")


@click.group(invoke_without_command=True)
@with_api
@as_json
@click.pass_context
def gpus(ctx: click.Context, api: Api, *, as_json: bool) -> None:
    """Show GPUs by node: what is leased, used by others, free, or closed and why."""
    if ctx.invoked_subcommand:
        return
    answer = api.get("/gpus")
    if as_json:
        print_json(answer)
    else:
        print_gpus(answer["gpus"])


@gpus.command()
@click.argument("gpu_uuid", shell_complete=completion.gpu_uuids)
@with_api
@as_json
def clear(api: Api, gpu_uuid: str, *, as_json: bool) -> None:
    """End the quarantine of a GPU, after looking who still held its memory (runbook gpu-quarantine)."""
    answer = api.post(gpu_path(gpu_uuid, "clear"))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{gpu_uuid} {'may be leased again' if answer['cleared'] else 'was not quarantined'}")


def _indexes(lease: dict[str, Any]) -> dict[str, str | None]:
    found = [gpu["gpu_uuid"] if gpu["gpu_index"] is None else str(gpu["gpu_index"]) for gpu in lease.get("gpus", ())]
    return {"gpus": ",".join(found) or None}
