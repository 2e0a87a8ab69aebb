"""From an event to a job: a trigger's template, filled with fields of the event.

A value that is exactly `{"$field": "article.id"}` becomes that field of the event's payload, whatever it is; a text may
hold `${article.id}`, which becomes the field as text (`$${…}` stays as `${…}`). A path goes through objects by key and
through lists by number; `.` is the whole payload. Nothing is ever evaluated or imported: what stands in an event
can only be a value in the job, never its type, and never its id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.jobs import JobSpec
from orchestrator.jsontext import check_depth, strict_json
from orchestrator.names import MAX_NAME, is_name

FIELD = "$field"
#: The path of the whole payload.
ALL = "."
#: How deep a template may be: it is kept as JSON that MariaDB checks, 32 levels and no more.
MAX_DEPTH = 24
#: Characters of a template as text, and of a path in it.
MAX_TEMPLATE, MAX_PATH = 65_536, 256

_PLACE = re.compile(r"(\$?)\$\{([^{}]*)\}")
_NOT_IN_A_PREFIX = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Event:
    """One entry of the stream of events. `event_id` is its producer's name for it, else the entry's own id."""

    entry_id: str
    type: str
    event_id: str
    payload: dict[str, Any]

    @classmethod
    def parse(cls, entry_id: str, fields: Mapping[bytes, bytes], max_bytes: int, max_depth: int) -> Self:
        """Raises InvalidInput: nobody can make a job of such an event, now or later."""
        raw = fields.get(b"payload", b"{}")
        if len(raw) > max_bytes:
            raise PayloadTooLarge(f"payload is larger than {max_bytes} bytes; pass a reference to the data", "payload")
        payload = strict_json(raw, "payload")
        if not isinstance(payload, dict):
            raise InvalidInput("payload: must be an object", "payload")
        check_depth(payload, "payload", max_depth)
        event_id = fields.get(b"event_id", b"") or entry_id.encode()
        return cls(entry_id, type_of(fields), event_id.decode(errors="surrogateescape"), payload)


def type_of(fields: Mapping[bytes, bytes]) -> str:
    """Raises InvalidInput."""
    named = fields.get(b"type", b"").decode(errors="replace")
    if not is_name(named):
        raise InvalidInput("type: an entry needs the type of its event, 1-128 of A-Za-z0-9._:-", "type")
    return named


def job_id(trigger: str, event_id: str) -> str:
    """The same event makes the same job however often it comes: TRIGGER:EVENT_ID, hashed where that is no name.

    A colon in the trigger's name is hashed too: otherwise two triggers could make one id of two events.
    """
    plain = f"{trigger}:{event_id}"
    if is_name(plain) and ":" not in trigger:
        return plain
    digest = hashlib.sha256(f"{trigger}\0{event_id}".encode(errors="surrogateescape")).hexdigest()
    return f"{_NOT_IN_A_PREFIX.sub('-', trigger)[: MAX_NAME - 1 - len(digest)]}:{digest}"


def job_body(trigger: str, template: Mapping[str, Any], event: Event, max_chars: int) -> dict[str, Any]:
    """What to submit. Raises InvalidInput when the event lacks a field, or fills more than `max_chars`."""
    filled: dict[str, Any] = fill(template, event.payload, max_chars)
    return filled | {"job_id": job_id(trigger, event.event_id)}


def fill(template: object, payload: Mapping[str, Any], max_chars: int) -> Any:
    """The template with all its places filled."""
    fields = _Fields(payload, max_chars)

    def one(value: object) -> Any:
        if isinstance(value, dict):
            if FIELD in value:
                return fields.value(value[FIELD])
            return {key: one(child) for key, child in value.items()}
        if isinstance(value, list):
            return [one(child) for child in value]
        return _with_places(value, fields.text) if isinstance(value, str) else value

    return one(template)


def check_template(template: Mapping[str, Any]) -> None:
    """Raises InvalidInput that names the field of the job; what depends on the event is seen when one comes."""
    check_depth(template, "job", MAX_DEPTH)
    try:
        size = len(json.dumps(template, allow_nan=False))
    except (ValueError, TypeError):
        raise InvalidInput("job: must be plain JSON", "job") from None
    if size > MAX_TEMPLATE:
        raise InvalidInput(f"job: larger than {MAX_TEMPLATE} characters", "job")
    if "job_id" in template:
        raise InvalidInput("job.job_id: is made of the trigger's name and the event's id; leave it out", "job.job_id")
    open_fields = set()
    for name, value in template.items():
        for path in _paths(value, f"job.{name}"):
            _check_path(path, f"job.{name}")
            open_fields.add(name)
    if "type" in open_fields:
        raise InvalidInput("job.type: must be fixed; an event does not choose what runs", "job.type")
    if unknown := sorted(open_fields - JobSpec.model_fields.keys()):
        raise InvalidInput(f"unknown field {unknown[0][:80]!r} of a job", f"job.{unknown[0][:80]}")
    known = {name: value for name, value in template.items() if name not in open_fields}
    JobSpec.parse(known | ({"payload": {}} if "payload" in open_fields else {}))


class _Fields:
    """Looks fields up, and counts how much of the event goes into the job: a path may stand there a thousand times."""

    def __init__(self, payload: Mapping[str, Any], max_chars: int) -> None:
        self._payload = payload
        self._left = self._most = max_chars
        self._sizes: dict[str, int] = {}

    def value(self, path: str) -> Any:
        found = lookup(self._payload, path)
        if path not in self._sizes:
            self._sizes[path] = len(json.dumps(found, ensure_ascii=False))
        self._spend(self._sizes[path])
        return found

    def text(self, path: str) -> str:
        found = lookup(self._payload, path)
        if found is None or isinstance(found, dict | list):
            raise InvalidInput(f"{path[:80]}: is no text or number, and cannot stand within a text", path[:80])
        text = found if isinstance(found, str) else json.dumps(found)
        self._spend(len(text))
        return text

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise PayloadTooLarge(f"the job would take more than {self._most} characters from the event", "payload")


def lookup(payload: object, path: str) -> Any:
    """Raises InvalidInput when there is no such field."""
    found = payload
    for step in path.split(".") if path != ALL else ():
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and _is_index(step) and int(step) < len(found):
            found = found[int(step)]
        else:
            raise InvalidInput(f"{path[:80]}: the event has no such field", path[:80])
    return found


def _is_index(step: str) -> bool:
    return len(step) < 10 and step.isascii() and step.isdecimal()


def _with_places(text: str, value: Callable[[str], str]) -> str:
    return _PLACE.sub(lambda found: found[0][1:] if found[1] else value(found[2]), text)


def _paths(value: object, where: str) -> Iterator[str]:
    """Every path that a template's value takes from the event."""
    if isinstance(value, dict):
        if FIELD in value:
            if len(value) > 1 or not isinstance(value[FIELD], str):
                raise InvalidInput(f'{where}: {{"{FIELD}": "PATH"}} stands alone, with a path as text', where)
            yield value[FIELD]
            return
        for child in value.values():
            yield from _paths(child, where)
    elif isinstance(value, list):
        for child in value:
            yield from _paths(child, where)
    elif isinstance(value, str):
        yield from (found[2] for found in _PLACE.finditer(value) if not found[1])


def _check_path(path: str, where: str) -> None:
    if path != ALL and (len(path) > MAX_PATH or not all(path.split("."))):
        raise InvalidInput(f"{where}: {path[:80]!r} is no path such as article.id or items.0.url", where)
