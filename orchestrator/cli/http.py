"""The flag that says where the server is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import click

from orchestrator.cli.options import Command
from orchestrator.client.api import Api
from orchestrator.client.paths import DEFAULT_URL, URL_VARIABLE
from orchestrator.client.wire import host_of
from orchestrator.errors import ConfigError


def _checked(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        host_of(url)
    except ConfigError as wrong:
        raise click.BadParameter(str(wrong)) from None
    return url


with_url: Callable[[Command], Command] = click.option(
    "--url",
    envvar=URL_VARIABLE,
    default=DEFAULT_URL,
    show_default=True,
    show_envvar=True,
    callback=_checked,
    help="Address of the server.",
)


def with_api(command: Command) -> Command:
    """The command gets an `Api` as its first argument."""

    @functools.wraps(command)
    def call(*args: Any, url: str, **kwargs: Any) -> Any:
        with closing(Api(url)) as api:
            return command(api, *args, **kwargs)

    return with_url(call)
