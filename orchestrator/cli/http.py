"""The flag that says where the server is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from orchestrator.cli.options import Command
from orchestrator.client.api import DEFAULT_URL, URL_VARIABLE, Api
from orchestrator.errors import ConfigError


def with_url(command: Command) -> Command:
    option: Callable[[Command], Command] = click.option(
        "--url",
        envvar=URL_VARIABLE,
        default=DEFAULT_URL,
        show_default=True,
        show_envvar=True,
        help="Address of the server.",
    )
    return option(command)


def with_api(command: Command) -> Command:
    """The command gets an `Api` as its first argument."""

    @functools.wraps(command)
    def call(*args: Any, url: str, **kwargs: Any) -> Any:
        return command(_open(url), *args, **kwargs)

    return with_url(call)


def _open(url: str) -> Api:
    try:
        return Api(url)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong), param_hint="--url") from None
