"""`gpuorch completion`: what a shell needs to complete commands, flags and names.

Names are asked of the server while somebody presses a key: within `LIMIT_S`, and a server that is away has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from orchestrator.cli import COMPLETE_VARIABLE, gpuorch
from orchestrator.client.api import Api
from orchestrator.client.paths import default_url
from orchestrator.client.steps import TIMEOUT_S
from orchestrator.errors import OrchestratorError

#: Seconds that a person waits for a list of names.
LIMIT_S = 1.0

#: What to do with the script, by shell.
_INSTALL = {
    "bash": 'eval "$(gpuorch completion bash)"  in ~/.bashrc',
    "zsh": 'eval "$(gpuorch completion zsh)"  in ~/.zshrc',
    "fish": "gpuorch completion fish > ~/.config/fish/completions/gpuorch.fish",
}


@click.command(epilog="  ".join(f"{shell}: {line}." for shell, line in _INSTALL.items()))
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete gpuorch's commands, flags and names."""
    found = get_completion_class(shell)
    assert found is not None
    # The script alone: asking the shell for its version, as the library does, starts it.
    complete = found(gpuorch, {}, "gpuorch", COMPLETE_VARIABLE)
    click.echo(complete.source_template % complete.source_vars())


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def names(
    path: str, listing: str, key: str, about: str = "status", params: Mapping[str, object] = MappingProxyType({})
) -> Complete:
    """Completes names from a listing of the server: `names("/workers/pool", "pools", "pool_id")`."""

    def complete(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            with closing(Api(str(ctx.params.get("url") or default_url()))) as api:
                rows: list[dict[str, Any]] = api.get(path, params, wait_s=LIMIT_S - TIMEOUT_S)[listing]
        except OrchestratorError:
            return []
        known = [row for row in rows if str(row.get(key) or "").startswith(incomplete)]
        return [CompletionItem(str(row[key]), help=str(row.get(about) or "") or None) for row in known]

    return complete


#: The latest jobs only: there may be millions.
job_ids = names("/jobs", "jobs", "job_id", params={"limit": 100})
dead_job_ids = names("/dlq", "dead_letters", "job_id", about="reason", params={"limit": 100})
pool_ids = names("/workers/pool", "pools", "pool_id")
node_ids = names("/nodes", "nodes", "node_id", about="gpu_backend")
schedule_ids = names("/schedules", "schedules", "schedule_id", about="cron")
workflow_ids = names("/workflows", "workflows", "workflow_id", params={"limit": 100})
gpu_uuids = names("/gpus", "gpus", "gpu_uuid", about="name")
