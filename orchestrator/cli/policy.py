"""`gpuorch policy …`: what operators decide at run time: shares and rates of agents, gates, caps, triggers."""

from __future__ import annotations

import json
from typing import Any

import click

from orchestrator.cli.http import with_api
from orchestrator.cli.options import Command, as_json
from orchestrator.cli.output import print_json, print_record, print_table, tell_of_next
from orchestrator.client.api import Api
from orchestrator.client.errors import Refused
from orchestrator.client.paths import policy_path

_LISTED = ("scope", "name", "version", "document", "updated_at", "actor")
_CHANGES = ("version", "changed_at", "actor", "before", "after")
_SCOPES = ("agent", "admission", "concurrency", "trigger")


@click.group()
def policy() -> None:
    """Policies: shares and rates of agents, gates, caps, triggers. In force everywhere within a second."""


def _which(command: Command) -> Command:
    """A scope and a name; the gates (`admission`) have none."""
    command = click.argument("name", required=False, callback=_fitting)(command)
    return click.argument("scope", type=click.Choice(_SCOPES))(command)


def _fitting(context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    if (name is None) != (context.params["scope"] == "admission"):
        raise click.UsageError("name an agent (* for all others), a key or a trigger; admission has no name")
    return name


@policy.command()
@_which
@with_api
@as_json
def get(api: Api, scope: str, name: str | None, *, as_json: bool) -> None:
    """Show a policy."""
    found = api.get(policy_path(scope, name))
    if as_json:
        print_json(found)
    else:
        print_record({key: value for key, value in found.items() if key != "document"} | found["document"])


@policy.command("list")
@click.argument("scope", type=click.Choice(_SCOPES), required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=500, show_default=True)
@click.option("--cursor", help="Continue where an earlier page ended; needs a scope.")
@with_api
@as_json
def list_policies(api: Api, scope: str | None, *, as_json: bool, **page: Any) -> None:
    """List policies, by name."""
    if page["cursor"] and scope is None:
        raise click.UsageError("--cursor needs a scope")
    pages = [_page(api, one, page) for one in ([scope] if scope else _SCOPES)]
    following = next((answer["next_cursor"] for answer in pages if answer["next_cursor"]), None)
    found = [one for answer in pages for one in answer["policies"]]
    if as_json:
        print_json({"policies": found, "next_cursor": following})
        return
    print_table(_LISTED, found, empty="no policies")
    tell_of_next({"next_cursor": following})


@policy.command("set")
@click.argument("scope", type=click.Choice(_SCOPES))
@click.argument("words", nargs=-1, metavar="[NAME] [FIELD=VALUE]...")
@click.option("--json-document", metavar="JSON", help="The whole policy; fields that it leaves out get their defaults.")
@with_api
@as_json
def set_policy(api: Api, scope: str, words: tuple[str, ...], *, json_document: str | None, as_json: bool) -> None:
    """Write a policy: rate=5 weight=2. Fields that are not named stay as they are; FIELD= sets one to its default."""
    first = [] if scope == "admission" else words[:1]
    if (scope != "admission" and not first) or any("=" in word for word in first):
        raise click.UsageError("name an agent (* for all others) or a key before the fields")
    name = first[0] if first else None
    fields = dict(_field(word) for word in words[len(first) :])
    if (json_document is None) == (not fields):
        raise click.UsageError("give either FIELD=VALUE or --json-document")
    path = policy_path(scope, name)
    body = _changed(api, path, fields) if json_document is None else _object(json_document)
    answer = api.put(path, body)
    _tell(answer, as_json=as_json)


@policy.command()
@_which
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@with_api
@as_json
def history(api: Api, scope: str, name: str | None, *, limit: int, as_json: bool) -> None:
    """Show every change of a policy, newest first."""
    found = api.get(policy_path(scope, name, "history"), {"limit": limit})
    if as_json:
        print_json(found)
    else:
        print_table(_CHANGES, found["changes"], empty="no changes")


@policy.command()
@_which
@click.option("--version", type=click.IntRange(1), required=True, help="As `gpuorch policy history` shows it.")
@with_api
@as_json
def rollback(api: Api, scope: str, name: str | None, *, version: int, as_json: bool) -> None:
    """Make a policy what it was after a change."""
    answer = api.post(policy_path(scope, name, "rollback"), {"version": version})
    _tell(answer, as_json=as_json)


@policy.command()
@_which
@with_api
@as_json
def delete(api: Api, scope: str, name: str | None, *, as_json: bool) -> None:
    """Forget a policy: its defaults are in force. Its history stays."""
    answer = api.delete(policy_path(scope, name))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['scope']} {answer['name']}  deleted: its defaults are in force")


def _page(api: Api, scope: str, page: dict[str, Any]) -> dict[str, Any]:
    if scope != "admission":
        found: dict[str, Any] = api.get(policy_path(scope, None), page)
        return found
    document = _known(api, policy_path(scope, None))
    return {"policies": [document] if document else [], "next_cursor": None}


def _known(api: Api, path: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = api.get(path)
    except Refused as refused:
        if refused.code != "policy_not_found":
            raise
        return None
    return found


def _changed(api: Api, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    known = _known(api, path)
    document = ({} if known is None else known["document"]) | fields
    return {key: value for key, value in document.items() if value is not None}


def _field(word: str) -> tuple[str, Any]:
    """The value as JSON, or as the text it is; nothing means the default."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise click.UsageError(f"{word!r} is not FIELD=VALUE")
    if not text:
        return key, None
    try:
        return key, json.loads(text)
    except (ValueError, RecursionError):
        return key, text


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise click.BadParameter(f"is no JSON: {wrong}", param_hint="--json-document") from None
    if not isinstance(found, dict):
        raise click.BadParameter("is no object", param_hint="--json-document")
    return found


def _tell(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    document = answer["document"]
    state = "has no policy" if document is None else f"version {answer['version']}: {json.dumps(document)}"
    click.echo(f"{answer['scope']} {answer['name']}  {state}")
