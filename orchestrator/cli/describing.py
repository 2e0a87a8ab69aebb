"""A job as flags: one for each field of its body, whose types and bounds are the body's own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import click

from orchestrator.cli import completion
from orchestrator.cli.options import Command
from orchestrator.errors import InvalidInput
from orchestrator.jobs import JobSpec
from orchestrator.jsontext import plain_json, strict_json

#: Each field of a job's body beside its type: its flag, and what it is for.
FLAGS: dict[str, tuple[str, str]] = {
    "payload": ("--payload", "An object; - reads standard input."),
    "job_id": ("--job-id", "Makes repeating this safe: the same id and content is one job."),
    "agent": ("--agent", "On whose behalf."),
    "pool_id": ("--pool", "Pool whose workers run it."),
    "model_id": ("--model", "Model it wants; a slot that has it loaded goes first."),
    "priority": ("--priority", "LOW, NORMAL, HIGH or -100…100; larger runs earlier."),
    "min_memory_mb": ("--min-memory-mb", "GPU memory it needs, on each of its GPUs."),
    "gpu_count": (
        "--gpu-count",
        "GPUs it needs, all on one node; counts only where the job, its pool or its handler needs GPU memory.",
    ),
    "cpu_fallback": ("--cpu-fallback", "Run it without a GPU when none has room."),
    "cost_units": ("--cost-units", "What it costs of its agent's share; by default as long as it takes."),
    "constraints": ("--constraint", "When it may run: quiet waits until the admission policy says that it is."),
    "workflow_id": ("--workflow", "Workflow that runs, of which it becomes a task."),
    "expected_duration_sec": ("--expected-duration", "Seconds it will take, about."),
    "earliest_start_at": ("--earliest-start", "Not before, such as 2030-01-31T12:00:00Z."),
    "deadline_at": ("--deadline", "It fails if it has not begun by then."),
    "max_runtime_sec": ("--max-runtime", "Seconds after which an attempt is ended."),
    "max_attempts": ("--max-attempts", "Attempts until it is given up."),
    "retry_base_sec": ("--retry-base", "Seconds before the second attempt, at most; they double with each."),
    "retry_cap_sec": ("--retry-cap", "Seconds between two attempts, at most."),
    "concurrency_keys": ("--concurrency-key", "What it shares with jobs that must not all run at once."),
    "tags": ("--tag", "To find it again: gpuorch jobs list --tag."),
}
_METAVARS = {
    "payload": "JSON|@FILE|-",
    "constraints": "quiet",
    "concurrency_keys": "KEY",
    "tags": "TAG",
    "earliest_start_at": "TIME",
    "deadline_at": "TIME",
}
_COMPLETED = {"pool_id": completion.pool_ids, "workflow_id": completion.workflow_ids}
_SCHEMA = JobSpec.model_json_schema()["properties"]


def with_job(without: Container[str] = ()) -> Callable[[Command], Command]:
    """The command takes a TYPE and these flags, and gets a `job`: the body with what was given, and nothing else."""
    fields = [name for name in JobSpec.model_fields if name != "type" and name not in without]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(*args: Any, type: str, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in fields}
            return command(*args, job=_body(type, given), **kwargs)

        flagged: Command = call
        for name in reversed(fields):
            flagged = _option(name)(flagged)
        return click.argument("type")(flagged)

    return decorate


def _option(name: str) -> Callable[[Command], Command]:
    flag, text = FLAGS[name]
    about = _about(name)
    many = about["type"] == "array" or name == "constraints"
    return click.option(
        flag,
        name,
        type=_kind(name, about),
        is_flag=about["type"] == "boolean",
        multiple=many,
        default="{}" if name == "payload" else None,
        metavar=_METAVARS.get(name, "SECONDS" if name.endswith("_sec") else None),
        shell_complete=_COMPLETED.get(name),
        help=f"{text} May be repeated." if many else text,
    )


def _about(name: str) -> dict[str, Any]:
    """What the schema says of a field that is given."""
    about = _SCHEMA[name]
    found: dict[str, Any] = next((one for one in about.get("anyOf", ()) if one["type"] != "null"), about)
    return found


def _kind(name: str, about: Mapping[str, Any]) -> click.ParamType[Any] | type:
    ranges: dict[str, Any] = {"integer": click.IntRange, "number": click.FloatRange}
    if name == "priority" or about["type"] not in ranges:  # a priority may also be a word
        return bool if about["type"] == "boolean" else str
    above = about.get("exclusiveMinimum")
    range_: click.ParamType[Any] = ranges[about["type"]](
        about.get("minimum", above), about.get("maximum"), min_open=above is not None
    )
    return range_


def _body(type: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Raises BadParameter that names the flag: what the body's own model refuses, no server is asked about."""
    body: dict[str, Any] = {"type": type}
    for name, value in given.items():
        if value is not None and value != ():
            body[name] = _READ[name](value) if name in _READ else value
    try:
        JobSpec.parse(body)
    except InvalidInput as wrong:
        path = wrong.field or "type"
        field, _, _ = path.partition(".")
        flag = "TYPE" if field == "type" else FLAGS[field][0]
        raise click.BadParameter(wrong.message.removeprefix(f"{path}: "), param_hint=flag) from None
    return body


def read_payload(text: str) -> object:
    """Raises BadParameter for what no server would take as JSON."""
    try:
        if text == "-":
            raw = sys.stdin.buffer.read()
        elif text.startswith("@"):
            raw = Path(text[1:]).read_bytes()
        else:
            raw = text.encode(errors="surrogatepass")  # what is no UTF-8 came as halves of characters
        payload = strict_json(raw, "it")
        plain_json(payload, "it")
    except OSError as error:
        raise click.BadParameter(f"{error.filename}: {error.strerror}", param_hint="--payload") from None
    except InvalidInput as wrong:
        raise click.BadParameter(wrong.message, param_hint="--payload") from None
    return payload


def named_priority(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        return text.upper()


#: How what was typed becomes the field, where it is more than itself.
_READ: dict[str, Callable[[Any], object]] = {
    "payload": read_payload,
    "priority": named_priority,
    "constraints": lambda names: dict.fromkeys(names, True),
    "concurrency_keys": list,
    "tags": list,
}
