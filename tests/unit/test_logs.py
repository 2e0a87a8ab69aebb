"""Log lines: one event is one line, for people and for machines."""

import json
import logging
import sys

import pytest

from orchestrator.settings import Settings
from orchestrator.telemetry import logs
from orchestrator.telemetry.logs import ConsoleLines, JsonLines


def record(message="job done", exc_info=None, **extra):
    made = logging.LogRecord("orchestrator.test", logging.WARNING, __file__, 1, message, (), exc_info)
    made.__dict__.update(extra)
    return made


def test_json_lines_carry_the_event_and_its_fields():
    line = json.loads(JsonLines().format(record(job_id="j-1", attempt=2)))
    assert (line["event"], line["level"], line["logger"]) == ("job done", "warning", "orchestrator.test")
    assert (line["job_id"], line["attempt"]) == ("j-1", 2)
    assert line["ts"].endswith("+00:00")


def test_a_newline_in_a_value_cannot_forge_a_line():
    forged = "x\n12:00:00.000 ERROR root: all is lost\r\n{}"
    for formatter in (JsonLines(), ConsoleLines()):
        text = formatter.format(record(forged, agent=forged))
        assert "\n" not in text
        assert "\r" not in text


def test_values_that_json_does_not_know_are_shown_as_text():
    line = json.loads(JsonLines().format(record(path=object(), number=1.5)))
    assert line["path"].startswith("<object")
    assert line["number"] == 1.5


@pytest.mark.parametrize("formatter", [JsonLines(), ConsoleLines()])
def test_an_exception_is_shown_with_its_trace(formatter):
    try:
        raise RuntimeError("the cause")
    except RuntimeError:
        text = formatter.format(record(exc_info=sys.exc_info()))
    assert "RuntimeError: the cause" in text
    assert "Traceback" in text


@pytest.mark.parametrize(("name", "formatter"), [("json", JsonLines), ("console", ConsoleLines)])
def test_the_format_and_the_level_are_settings(name, formatter):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.configure(Settings(log_format=name, log_level="error"))
        assert isinstance(root.handlers[0].formatter, formatter)
        assert root.level == logging.ERROR
    finally:
        root.handlers[:], root.level = before
