"""Log lines: an event name and its fields, for people (console) or machines (JSON). Newlines cannot forge lines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from orchestrator.settings import Settings

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


def configure(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else ConsoleLines())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)


def fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "event": record.getMessage(),
        }
        line |= fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class ConsoleLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        extra = "".join(f" {key}={_one_line(value)}" for key, value in fields(record).items())
        text = f"{when} {record.levelname:<7} {record.name}: {_one_line(record.getMessage())}{extra}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _one_line(value: object) -> str:
    return str(value).replace("\r", "\\r").replace("\n", "\\n")
