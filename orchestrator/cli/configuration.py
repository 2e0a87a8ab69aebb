"""`gpuorch check-config`: every effective value and where it came from."""

from __future__ import annotations

from dataclasses import asdict

import click

from orchestrator.cli.options import as_json, with_settings
from orchestrator.cli.output import print_json, print_table
from orchestrator.config import Loaded, describe
from orchestrator.settings import FIELDS


@click.command("check-config")
@with_settings(*FIELDS)
@as_json
def check_config(loaded: Loaded, *, as_json: bool) -> None:
    """Check the settings and show each value and its source; passwords are masked.

    Flags beat the file, the file beats the environment, the environment beats the defaults.
    """
    rows = [asdict(row) for row in describe(loaded)]
    if as_json:
        print_json(rows)
    else:
        print_table(["setting", "value", "source"], [{"setting": row["field"], **row} for row in rows])
