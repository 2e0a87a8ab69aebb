"""Log lines: one event is one line, for people and for machines."""

import json
import logging
import secrets
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from sqlalchemy import text

from orchestrator import jobs
from orchestrator.jobs import ErrorKind
from orchestrator.leases import new_token
from orchestrator.settings import Settings
from orchestrator.store.settle import End, Outcome, Settled
from orchestrator.telemetry import life, logs
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


# ── forging ─────────────────────────────────────────────────────────────────────────────────────────────────────────

FORGED = "12:00:00.000 ERROR   root: all is lost"
#: Whatever ends a line somewhere, moves a cursor, or turns text around.
NASTY = [
    "\n",
    "\r",
    "\x0b",
    "\x0c",
    "\x1b[2K",
    "\x1b]0;title\x07",
    "\x1c",
    "\x85",
    "\x9b31m",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\u200f",
    "\ufeff",
    "\x00",
    "\ud800",
]


def unprintable(text: str) -> set[str]:
    return {character for character in text if not character.isprintable()}


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
@pytest.mark.parametrize("where", ["event", "value", "logger", "thread", "argument"])
@pytest.mark.parametrize("formatter", [JsonLines(), ConsoleLines()])
def test_nothing_that_moves_a_terminal_or_ends_a_line_gets_through(formatter, where, nasty):
    evil = f"x{nasty}{FORGED}"
    made = record(evil if where == "event" else "job done", job_type=evil if where == "value" else "y")
    if where == "logger":
        made.name = evil
    if where == "thread":
        made.threadName = evil
    if where == "argument":
        made.msg, made.args = "of %s", (evil,)
    text = formatter.format(made)
    assert unprintable(text) == set()
    text.encode()


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
def test_a_traceback_cannot_forge_a_line_on_the_console(nasty):
    try:
        raise RuntimeError(f"oh{nasty}{FORGED}")
    except RuntimeError:
        text = ConsoleLines().format(record(exc_info=sys.exc_info()))
    first, *rest = text.split("\n")
    assert first.endswith("job done")
    assert rest and all(line.startswith("  | ") for line in rest)
    assert "all is lost" in text and "Traceback" in text  # and it can be read
    assert unprintable(text) <= {"\n"}


def test_in_json_a_traceback_is_a_field():
    try:
        raise RuntimeError(f"oh\n{FORGED}")
    except RuntimeError:
        text = JsonLines().format(record(exc_info=sys.exc_info()))
    assert "\n" not in text
    assert json.loads(text)["exception"].endswith(FORGED)


def test_what_cannot_be_shown_is_no_trouble():
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    for formatter in (JsonLines(), ConsoleLines()):
        text = formatter.format(record(was=Broken(), pause_s=float("nan"), keys=["a", Broken()], error="x" * 10_000))
        assert "Broken" in text and len(text) < 5000
    made = record("of %d")
    made.args = ("no number",)
    assert json.loads(JsonLines().format(made))["event"] == "of %d"
    json.loads(JsonLines().format(record(pause_s=float("inf"))), parse_constant=pytest.fail)


def test_a_field_cannot_pass_for_the_event():
    line = json.loads(JsonLines().format(record(event="forged", level="debug")))
    assert (line["event"], line["level"]) == ("job done", "warning")


# ── secrets ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TOKEN = new_token()
SECRETS = [
    ("mysql+pymysql://me:hunter2@127.0.0.1:1/jobs: gone away", "hunter2", "127.0.0.1:1/jobs: gone away"),
    ("redis://:hunter2@host:6379/0 refused", "hunter2", "host:6379/0 refused"),
    ("Authorization: Bearer hunter2hunter2", "hunter2", "Authorization"),
    ("{'authorization': 'Basic aHVudGVyMg=='}", "aHVudGVyMg", "authorization"),
    ("sent Bearer abc.def-hunter2", "hunter2", "sent"),
    (f"POST /leases/{TOKEN}/release", TOKEN, "/release"),
    (f"lease {TOKEN} is not known", TOKEN, "is not known"),
    ("(1366, \"Incorrect string value: 'hunter2' for column `o`.`payload`\")", "hunter2", "payload"),
    ("syntax error near 'hunter2 it\\'s hunter2' at line 1", "hunter2", "at line 1"),
    ("[SQL: INSERT INTO x]\n[parameters: ('hunter2', [1])]\n(Background on this error", "hunter2", "INSERT INTO x"),
    ("1 validation error [type=x, input_value={'a': 'hunter2'}, input_type=dict]", "hunter2", "input_type=dict"),
]


@pytest.mark.parametrize(("text", "secret", "kept"), SECRETS)
@pytest.mark.parametrize("where", ["event", "value", "exception"])
@pytest.mark.parametrize("formatter", [JsonLines(), ConsoleLines()])
def test_secrets_of_libraries_are_masked(formatter, where, text, secret, kept):
    try:
        raise RuntimeError(text)
    except RuntimeError:
        trace = sys.exc_info() if where == "exception" else None
    made = record(text if where == "event" else "x", exc_info=trace, **({"error": text} if where == "value" else {}))
    line = formatter.format(made)
    assert secret not in line
    assert kept in line


#: Texts that invite a pattern to look at the same characters again and again.
HOSTILE = {
    "scheme": lambda size: "see http://x/ " + "a" * size,
    "schemes": lambda size: "http://x/ " + "a+" * (size // 2),
    "addresses": lambda size: "a://" * (size // 4),
    "users": lambda size: "a://" + "x:" * (size // 2),
    "arguments": lambda size: "a://x" + "?" * size,
    "passwords": lambda size: "a://x?" + "pass" * (size // 4),
    "quotes": lambda size: "near '" * (size // 6),
    "pairs": lambda size: "near '" + "''" * (size // 2) + "x",
    "headers": lambda size: "authorization: " * (size // 15),
    "spaces": lambda size: "bearer" + " " * size,
    "parameters": lambda size: "[parameters: " * (size // 13),
    "inputs": lambda size: "input_value=" * (size // 12),
    "tokens": lambda size: "-" * size,
}


def work(run) -> float:
    """Seconds of the processor, at best."""

    def once() -> float:
        begun = time.thread_time()
        run()
        return time.thread_time() - begun

    return min(once() for _ in range(3))


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_masking_is_work_that_grows_with_the_text_and_not_with_its_square(hostile):
    small, large = (work(partial(logs.masked, hostile(size))) for size in (10_000, 40_000))
    assert large < 9 * small


@pytest.mark.parametrize("where", ["event", "value", "exception"])
@pytest.mark.parametrize("formatter", [JsonLines(), ConsoleLines()])
def test_a_line_is_bounded_work_whatever_is_in_it(formatter, where):
    def made(size: int) -> logging.LogRecord:
        text = "http://x/ " + "a" * size
        trace = (ValueError, ValueError(text), None) if where == "exception" else None
        extra = {"error": text} if where == "value" else {}
        return record(text if where == "event" else "x", exc_info=trace, **extra)

    small, large = (work(partial(formatter.format, made(size))) for size in (1_000_000, 2_000_000))
    assert large < 4 * small
    assert len(formatter.format(made(2_000_000))) < 50_000


def test_what_is_cut_from_a_traceback_takes_no_mask_with_it():
    secret = f"[parameters: ('{'hunter2' * 3000}',)]"
    line = JsonLines().format(record(exc_info=(ValueError, ValueError(f"{secret}\n(Background"), None)))
    assert "hunter2" not in line and "[parameters: ***]" in line


@pytest.mark.parametrize(
    "address",
    ["1http://me:hunter2@host", "-redis://:hunter2@host", "a.b+c://me:hunter2@h", "x=éhttp://me:hunter2@h"],
)
def test_an_address_is_masked_whatever_stands_before_it(address):
    assert "hunter2" not in logs.masked(f"see {address}/0?n=1")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://h/?a=1&api_token=x&b=2", "http://h/?a=1&api_token=***&b=2"),
        ("http://h/?a=b?token=x", "http://h/?a=b?token=***"),
        ("http://h/?x?password?y=x=z", "http://h/?x?password?y=***"),
        ("http://h/?token&a=1", "http://h/?token&a=1"),
        ("http://h/?PassWord=x&pwd=", "http://h/?PassWord=***&pwd=***"),
    ],
)
def test_secrets_among_the_arguments_of_an_address_are_masked(given, shown):
    assert logs.masked(given) == shown


def test_an_id_of_ours_is_shown_whatever_it_looks_like():
    job_id = "j" * 43
    assert json.loads(JsonLines().format(record(job_id=job_id)))["job_id"] == job_id


def test_an_error_of_the_database_hides_the_values(db):
    secret = secrets.token_hex(8)
    with pytest.raises(Exception, match="nowhere") as wrong:
        db.write(lambda conn: conn.execute(text("INSERT INTO nowhere VALUES (:payload)"), {"payload": secret}))
    assert secret not in "".join(traceback.format_exception(wrong.value))


# ── what lines are about ────────────────────────────────────────────────────────────────────────────────────────────


def told(**extra):
    return json.loads(JsonLines().format(record(**extra)))


def test_a_block_says_once_what_its_lines_are_about():
    with logs.bind(worker_id="w", pool_id="p", epoch=None):
        with logs.bind(epoch=3, pool_id="q"):
            line = told(job_id="j", pool_id="r")
            assert (line["worker_id"], line["pool_id"], line["epoch"], line["job_id"]) == ("w", "r", 3, "j")
        assert told()["pool_id"] == "p"
        assert "epoch" not in told()
    assert "worker_id" not in told()


def test_threads_of_a_block_are_about_the_same():
    seen = []
    with logs.bind(worker_id="w"):
        made = logs.thread(lambda: seen.append(told()["worker_id"]), "one")
        pool = ThreadPoolExecutor(1, initializer=logs.inherited())
    made.start()
    made.join()
    seen.append(pool.submit(told).result()["worker_id"])
    pool.shutdown()
    assert seen == ["w", "w"]
    assert made.daemon and made.name == "one"


def test_fixed_fields_are_on_every_line():
    assert json.loads(JsonLines({"node_id": "n"}).format(record()))["node_id"] == "n"


def test_an_ordinary_end_is_told_at_debug_only(caplog):
    end = End("j", 1, Outcome.DONE)
    with caplog.at_level(logging.INFO, life.log.name):
        life.settled([Settled(end, jobs.FINISH)] * 3)
        life.settled([Settled(End("k", 2, Outcome.FAILED, error_kind=ErrorKind.TIMEOUT), jobs.BURY)], worker_id="w")
    (line,) = caplog.records
    assert (line.message, line.levelname) == ("job dead-lettered", "WARNING")
    assert (line.job_id, line.attempt, line.error_kind, line.worker_id) == ("k", 2, "timeout", "w")
    with caplog.at_level(logging.DEBUG, life.log.name):
        trace = "0af7651916cd43dd8448eb211c80319c"
        traced = end._replace(trace_context=f"00-{trace}-b7ad6b7169203331-01")
        life.settled([Settled(traced, jobs.FINISH)])
    assert (caplog.records[-1].message, caplog.records[-1].trace_id) == ("job done", trace)
