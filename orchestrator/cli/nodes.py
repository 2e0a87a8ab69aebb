"""`gpuorch nodes …`: the machines that run jobs, and how to empty them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from orchestrator.cli import completion
from orchestrator.cli.http import with_api
from orchestrator.cli.options import Command, as_json
from orchestrator.cli.output import print_json, print_table
from orchestrator.client.api import Api

_LISTED = ("node_id", "state", "workers", "slots", "running", "gpu_backend", "heartbeat_age_seconds")


@click.group()
def nodes() -> None:
    """Nodes: the machines that run jobs."""


def _which(command: Command) -> Command:
    """One by its name, or all of them, which must be said."""
    command = click.option("--all", "everywhere", is_flag=True, help="All nodes that are known now.")(command)
    return click.argument("node_id", required=False, shell_complete=completion.node_ids)(command)


@nodes.command("list")
@with_api
@as_json
def list_nodes(api: Api, *, as_json: bool) -> None:
    """List nodes and what runs there; only those whose STATE is open take jobs."""
    answer = api.get("/nodes")
    if as_json:
        print_json(answer)
    else:
        print_table(_LISTED, [node | {"state": _state(node)} for node in answer["nodes"]], empty="no nodes")


@nodes.command()
@_which
@click.option("--timeout", type=click.FloatRange(0), help="Seconds that running jobs get; then they are handed back.")
@with_api
@as_json
def drain(api: Api, *, timeout: float | None, as_json: bool, **which: Any) -> None:
    """Empty a node: it takes no more jobs until it is resumed, and its pools move elsewhere."""
    wait = {} if timeout is None else {"timeout_seconds": timeout}
    _tell(api, "drain_node", _meant(**which) | wait, "told to drain", as_json=as_json)


@nodes.command()
@_which
@with_api
@as_json
def resume(api: Api, *, as_json: bool, **which: Any) -> None:
    """Let a node take jobs again."""
    _tell(api, "resume_node", _meant(**which), "told to take jobs", as_json=as_json)


def _state(node: dict[str, Any]) -> str:
    """Of one that drains, until when its jobs may run; a moment that is over says nothing any more."""
    until = node.get("drain_until")
    if until is None:
        return "open"
    if not node["running"]:
        return "drained"
    return f"draining until {until}" if datetime.fromisoformat(until) > datetime.now(UTC) else "draining"


def _meant(*, node_id: str | None, everywhere: bool) -> dict[str, Any]:
    if (node_id is None) != everywhere:
        raise click.UsageError("name one node, or say --all")
    return {"all": True} if node_id is None else {"node_id": node_id}


def _tell(api: Api, action: str, body: dict[str, Any], what: str, *, as_json: bool) -> None:
    answer = api.post(f"/control/{action}", body)
    if as_json:
        print_json(answer)
    else:
        click.echo(f"nodes {what}: {answer['nodes']}")
