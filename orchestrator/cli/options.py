"""Flags that are settings: a command names the fields it takes and is called with what was loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from orchestrator.config import Loaded, load
from orchestrator.errors import ConfigError
from orchestrator.names import is_name
from orchestrator.settings import FIELDS

#: Flags whose name is not simply that of the field.
_NAMES = {
    "worker_pool": "--pool",
    "worker_slots": "--slots",
    "worker_handlers": "--handlers",
    "gpu_backend": "--gpus",
}
#: What a value looks like in the help; numbers are checked by click, everything else by Settings.
_METAVARS = {
    "database_url": "URL",
    "redis_url": "URL",
    "host": "ADDRESS",
    "data_dir": "DIR",
    "worker_pool": "POOL",
    "worker_handlers": "MODULE",
    "gpu_backend": "NxMB",
    "log_level": "LEVEL",
    "log_format": "FORMAT",
}

Command = Callable[..., Any]

#: What whoever starts a worker may set.
OF_WORKERS = (
    "worker_pool",
    "worker_slots",
    "worker_handlers",
    "gpu_backend",
    "node_id",
    "database_url",
    "redis_url",
    "data_dir",
    "log_level",
    "log_format",
)


def with_settings(*fields: str, **renamed: str) -> Callable[[Command], Command]:
    """`@with_settings("port", worker_slots="--workers")`: the command gets `loaded` as its first argument."""
    names = {field: _flag(field) for field in fields} | renamed

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(*args: Any, config: Path | None, **kwargs: Any) -> Any:
            flags = {field: _value(field, kwargs.pop(field)) for field in names}
            return command(_loaded(flags, config), *args, **kwargs)

        flagged: Command = call
        for field, name in reversed(names.items()):
            flagged = _option(field, name)(flagged)
        return _config_option(flagged)

    return decorate


def _loaded(flags: Mapping[str, object], config_file: Path | None) -> Loaded:
    """Raises ConfigError; UsageError instead where all would be well without the flags."""
    try:
        return load(cli=flags, config_file=config_file)
    except ConfigError as wrong:
        try:
            load(config_file=config_file)
        except ConfigError:
            raise wrong from None
        raise click.UsageError(str(wrong), click.get_current_context()) from None


class JobId(click.ParamType[str]):
    """No other text is sent: as part of a path it would ask for something else."""

    name = "job_id"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value if is_name(value) else self.fail(f"not a job id: {value!r}", param, ctx)


def as_json(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


_config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file with settings; it beats the environment (ORCH_*).",
)


def _flag(field: str) -> str:
    return _NAMES.get(field, "--" + field.replace("_", "-"))


def _option(field: str, name: str) -> Callable[[Command], Command]:
    info = FIELDS[field]
    many = field == "worker_handlers"
    return click.option(
        name,
        field,
        type=int if info.annotation is int else str,
        multiple=many,
        metavar=_METAVARS.get(field),
        help=f"{info.description}{'; may be repeated' if many else ''}",
    )


def _value(field: str, given: Any) -> object:
    """What Settings expects; None when the flag was not given."""
    if field == "worker_handlers":
        return tuple(part for item in given for part in item.split(",")) or None
    if field == "gpu_backend" and given and given[0].isdigit():
        return f"sim:{given}"
    return given
