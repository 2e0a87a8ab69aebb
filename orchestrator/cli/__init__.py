"""`gpuorch`: one module per noun, each command a few lines over the code that does the work.

Exit codes: 0 ok · 1 refused or failed · 2 wrong usage · 3 a server cannot be reached · 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from orchestrator import __version__
from orchestrator.__main__ import INTERRUPTED
from orchestrator.errors import OrchestratorError, Unavailable

REFUSED, UNREACHABLE = 1, 3
#: By which the scripts of `gpuorch completion` ask what may come next.
COMPLETE_VARIABLE = "_GPUORCH_COMPLETE"

#: Command, and the module that has it under the same name with underscores; the order is that of the help.
COMMANDS = {
    "dev": "dev",
    "serve": "servers",
    "worker": "servers",
    "drain-worker": "prestop",
    "scaler": "scaler",
    "migrate": "schema",
    "check-config": "configuration",
    "doctor": "doctor",
    "run": "leased",
    "jobs": "jobs",
    "queue": "queue",
    "dlq": "dlq",
    "schedules": "schedules",
    "workflows": "workflows",
    "leases": "fleet",
    "pools": "pools",
    "nodes": "nodes",
    "policy": "policy",
    "workers": "fleet",
    "gpus": "fleet",
    "leader": "leader",
    "duty": "leader",
    "audit": "audit",
    "top": "top",
    "completion": "completion",
}


class LazyCommands(click.Group):
    """Imports only the module of the command that runs: the database's library alone takes a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Names those like it where there is none: click knows only commands that are imported."""
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            from difflib import get_close_matches

            if near := get_close_matches(name, COMMANDS):
                ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names alone: their help would import every module while somebody waits."""
        flags = super(click.Group, self).shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return [*(CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)), *flags]


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="gpuorch")
def gpuorch() -> None:
    """GPU job orchestrator: MariaDB remembers, Redis Streams delivers, workers hold GPU leases.

    To try it without installing anything else: gpuorch dev
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors that have a name end as one message, without a trace."""
    try:
        code = gpuorch.main(args=arguments, prog_name="gpuorch", standalone_mode=False, complete_var=COMPLETE_VARIABLE)
    except click.ClickException as wrong:
        wrong.show()
        return wrong.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except OrchestratorError as error:
        click.echo(f"gpuorch: {error}", err=True)
        return UNREACHABLE if isinstance(error, Unavailable) else REFUSED
    return code if isinstance(code, int) else 0
