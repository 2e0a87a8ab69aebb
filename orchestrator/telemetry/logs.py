"""Log lines: an event name and its fields, for people (console) or machines (JSON). No value can forge a line.

`docs/logs.md` has all names of fields. A block says once what its lines are about (`bind`); a thread that belongs to it
is made by `thread`, or told by `inherited`. Secrets and payloads are not given to a logger in the first place; what
libraries put into their messages is masked here.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from orchestrator.settings import Settings, safe_url

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
#: Characters of one value, and of a traceback, that are shown.
MAX_VALUE, MAX_TRACE = 2000, 20_000
#: Characters of a traceback that are looked through for secrets: a line is written under its handler's lock.
MAX_MASKED = 5 * MAX_TRACE
#: Libraries that tell, at debug level, what they send (headers, addresses with tokens, statements with their values),
#: and at info what our own lines say better.
QUIET = ("alembic", "httpcore", "httpx", "sqlalchemy", "urllib3", "uvicorn.access", "uvicorn.error")


def configure(settings: Settings, **fixed: object) -> None:
    """Log to stderr. `fixed` are fields of every line of this process."""
    handler = _Lines(sys.stderr)
    formatter = JsonLines if settings.log_format == "json" else ConsoleLines
    handler.setFormatter(formatter(fixed))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Lines(logging.StreamHandler[Any]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Stderr cannot be written: nowhere is left to say so. The library would quote the record, unmasked."""


# ── what lines are about ────────────────────────────────────────────────────────────────────────────────────────────

_bound: ContextVar[dict[str, object]] = ContextVar("bound", default={})  # noqa: B039 - never changed, only replaced


@contextmanager
def bind(**fields: object) -> Iterator[None]:
    """Lines of this block have these fields, those without a value excepted."""
    token = _bound.set(_bound.get() | {name: value for name, value in fields.items() if value is not None})
    try:
        yield
    finally:
        _bound.reset(token)


def inherited() -> Callable[[], None]:
    """For another thread to call first: its lines are about what ours are about now."""
    ours = _bound.get()

    def adopt() -> None:
        _bound.set(ours)

    return adopt


def thread(target: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread whose lines are about what ours are about now."""
    adopt = inherited()

    def run() -> None:
        adopt()
        target()

    return threading.Thread(target=run, name=name, daemon=True)


def fields(record: logging.LogRecord) -> dict[str, object]:
    own = {key: value for key, value in record.__dict__.items() if key not in _STANDARD and value is not None}
    return _bound.get() | own


# ── what they look like ─────────────────────────────────────────────────────────────────────────────────────────────


class _Formatter(logging.Formatter):
    def __init__(self, fixed: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._fixed = dict(fixed or {})

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        return self._fixed | fields(record)

    def trace(self, record: logging.LogRecord) -> str:
        """The traceback and what else has lines, masked; empty when there is none."""
        parts = [self.formatException(record.exc_info)] if record.exc_info else []
        parts += [self.formatStack(record.stack_info)] if record.stack_info else []
        # Its end says what went wrong. More of it is masked than is shown, so that a secret is seen from its beginning.
        text = masked("\n".join(parts)[-MAX_MASKED:])
        return text if len(text) <= MAX_TRACE else f"…{text[-MAX_TRACE:]}"


class JsonLines(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "event": masked(_text(record)),
        }
        line |= {key: _plain(key, value) for key, value in self.fields(record).items() if key not in line}
        if trace := self.trace(record):
            line["exception"] = trace
        return json.dumps(line)


class ConsoleLines(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        shown = {key: _plain(key, value) for key, value in self.fields(record).items()}
        extra = "".join(f" {key}={one_line(value)}" for key, value in shown.items())
        event = one_line(masked(_text(record)))
        text = f"{when} {record.levelname:<7} {one_line(record.name)}: {event}{extra}"
        # Every line of a traceback begins with a bar: none of them can pass for an event.
        return "\n".join([text, *(f"  | {one_line(line)}" for line in self.trace(record).split("\n") if line)])


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()[:MAX_VALUE]
    except Exception:  # noqa: BLE001 - a library's message and its arguments do not fit: better half of it than none
        return str(record.msg)[:MAX_VALUE]


def _plain(key: str, value: object) -> Any:
    """As JSON has it. Names of ours keep their text: an id may look like a token."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(key, one) for one in list(value)[:100]]
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - whatever it is, its line must be written
        text = f"<{type(value).__name__}>"
    text = text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"
    return text if key.endswith("_id") else masked(text)


# ── what may not be seen ────────────────────────────────────────────────────────────────────────────────────────────

# A scheme is looked for where it begins, and nowhere within: the work grows with the text, not with its square.
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]++://[^\s'\"<>]+")
_SECRETS = (
    # Who may do something: headers and the tokens of leases, in a path or by themselves (`leases.new_token`).
    (re.compile(r"(authorization\W{1,5})(?:(?:bearer|basic)\s+)?[^\s'\",]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE), r"\1 ***"),
    (re.compile(r"(/leases/)[^/\s?'\"]+"), r"\1***"),
    (re.compile(r"(?<![\w-])[\w-]{43}(?![\w-])"), "***"),
    # Values that a database or its library quotes from a statement.
    (re.compile(r"\[parameters: .*?(?=\n\(Background|\Z)", re.DOTALL), "[parameters: ***]"),
    (re.compile(r"(\bvalue: |\bnear |\bentry )'(?:[^'\\]|\\.|'')*'", re.DOTALL), r"\1'***'"),
    (re.compile(r"(\binput_value=).*?(?=, input_type=|\]|\Z)", re.DOTALL), r"\1***"),
)


def masked(text: str) -> str:
    """The last line of defence: passwords in addresses, tokens, and values that a database's error quotes."""
    if "://" in text:
        text = _URL.sub(lambda url: safe_url(url[0]), text)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


#: What a terminal or an editor could take for something else than a character: controls, ends of lines of every kind,
#: marks that turn the direction of text, and halves of characters, which no stream takes.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def one_line(value: object) -> str:
    """Printable, on one line, and harmless to a terminal."""
    return _UNSEEN.sub(lambda found: _escaped(found[0]), str(value))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
