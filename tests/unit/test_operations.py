"""What a client decides, without a server: which requests it sends, which again, and how long it waits."""

import inspect
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from orchestrator.cancellation import Cancellation
from orchestrator.client import NotEnded, Refused, ServerUnreachable, patience
from orchestrator.client.api import Api
from orchestrator.client.nouns import DeadLettersOf, JobsOf, PoolsOf, WorkflowsOf
from orchestrator.client.operations import operation, streaming
from orchestrator.client.patience import Patience
from orchestrator.client.steps import Emit, Fan, Operation, Pause, Play, Request
from orchestrator.client.submitting import Submitting
from orchestrator.client.wire import Contact
from orchestrator.errors import Aborted

URL = "http://127.0.0.1:8008"


class Script:
    """Performs an operation by what the test answers: a value, or an error that is raised."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.requests: list[Request] = []
        self.pauses: list[float] = []
        self.emitted: list[Any] = []

    def run(self, work: Operation[Any]) -> Any:
        with Play(work) as play:
            while play.step is not None:
                if isinstance(play.step, Pause):
                    self.pauses.append(play.step.seconds)
                    play.answer(False)
                elif isinstance(play.step, Emit):
                    self.emitted.append(play.step.value)
                    play.answer()
                else:
                    assert isinstance(play.step, Request)
                    self.requests.append(play.step)
                    answer = self._answers.pop(0)
                    if isinstance(answer, ServerUnreachable | Refused):
                        play.fail(answer)
                    else:
                        play.answer(answer)
            return play.result


def refused(status: int, code: str = "overloaded", **more: Any) -> Refused:
    return Refused(httpx.Response(status, json={"detail": "later", "code": code} | more))


def unreadable() -> Refused:
    return Refused(httpx.Response(200, text="<html>"))


def lost(*, sent: bool = True) -> ServerUnreachable:
    return ServerUnreachable(URL, "lost", sent=sent)


@pytest.fixture
def api():
    with Api(URL) as door:
        door.contact.note()
        yield door


GET, SAFE, ONCE = Request("GET", "/x", repeatable=True), Request("POST", "/x", repeatable=True), Request("POST", "/x")


def insist(request: Request, *answers: Any, seconds: float = 60.0, answered: bool = True) -> tuple[Any, Script]:
    contact, script = Contact(), Script(*answers)
    if answered:
        contact.note()
    return script.run(Patience(contact, seconds).insist(request)), script


# --- what is sent again ---


@pytest.mark.parametrize("request_", [GET, SAFE])
@pytest.mark.parametrize(
    "error", [lost(), lost(sent=False), refused(429), refused(503), refused(502), refused(504), unreadable()]
)
def test_what_may_be_repeated_is(request_, error):
    answer, script = insist(request_, error, error, "at last")
    assert (answer, script.requests) == ("at last", [request_] * 3)
    assert all(1.0 <= pause <= 1.1 for pause in script.pauses)


@pytest.mark.parametrize("error", [lost(sent=False), refused(429)])
def test_what_cannot_have_been_done_is_sent_again_too(error):
    assert insist(ONCE, error, "at last")[0] == "at last"


@pytest.mark.parametrize("error", [lost(), refused(503), refused(502), refused(504), unreadable()])
def test_what_may_have_been_done_is_not(error):
    with pytest.raises((ServerUnreachable, Refused)):
        insist(ONCE, error)


@pytest.mark.parametrize("status", [400, 404, 409, 422, 500])
def test_what_waiting_does_not_mend_is_said_at_once(status):
    with pytest.raises(Refused):
        insist(GET, refused(status))


def test_a_server_says_when_to_come_again():
    _, script = insist(GET, refused(429, retry_after=7.5), "at last")
    assert 7.5 <= script.pauses[0] <= 8.25


def test_nobody_waits_longer_than_they_have_patience():
    with pytest.raises(Refused):
        insist(GET, refused(429, retry_after=61.0))
    with pytest.raises(ServerUnreachable):
        insist(GET, lost(), seconds=0.5)


def test_a_server_that_never_answered_is_not_waited_for():
    with pytest.raises(ServerUnreachable):
        insist(GET, lost(sent=False), answered=False)
    assert insist(GET, lost(), "it got the request", answered=False)[0] == "it got the request"


def test_nor_is_one_that_is_away_for_too_long(monkeypatch):
    monkeypatch.setattr(patience, "AWAY_S", -1.0)
    with pytest.raises(ServerUnreachable):
        insist(GET, lost())


def test_each_reason_is_told_once():
    told: list[str] = []
    script = Script(refused(429), refused(429), refused(503), 1)
    contact = Contact()
    script.run(Patience(contact, 60.0, told.append).insist(GET))
    assert [reason[:3] for reason in told] == ["429", "503"]


#: What is sent once, because twice would do more.
SENT_ONCE = {"retry", "delete", "redrive", "purge", "retry_failed", "rerun"}
ARGUMENTS: dict[str, Any] = {
    "job_id": "j",
    "pool_id": "p",
    "workflow_id": "w",
    "workers": 1,
    "priority": 5,
    "tasks": [],
    "task": "t",
    "job": {"type": "echo"},
    "job_ids": ["j"],
    "jobs": [],
}


def everything() -> list[tuple[type, str]]:
    kinds: list[type] = [JobsOf, PoolsOf, DeadLettersOf, WorkflowsOf]
    return [
        (kind, name) for kind in kinds for name, one in vars(kind).items() if isinstance(one, operation | streaming)
    ]


@pytest.mark.parametrize(("kind", "name"), everything(), ids=lambda part: getattr(part, "__name__", part))
def test_every_operation_is_repeatable_unless_twice_would_do_more(api, kind, name):
    steps: Callable[..., Operation[Any]] = getattr(kind, name).steps
    needed = [key for key, one in inspect.signature(steps).parameters.items() if one.default is one.empty]
    given = {key: ARGUMENTS[key] for key in needed if key not in {"self", "filters", "fields"}}
    with Play(steps(kind(api, 60.0), **given)) as play:
        first = play.step
    if isinstance(first, Fan):  # many jobs
        return
    assert isinstance(first, Request)
    assert first.repeatable == (name not in SENT_ONCE)


# --- what is asked ---


def test_a_job_has_its_id_before_it_is_sent(api):
    script = Script(lost(), {"created": False})
    script.run(Submitting.one.steps(Submitting(api), {"type": "echo"}))
    first, second = script.requests
    assert first.body == second.body and isinstance(first.body, bytes) and b'"job_id": "' in first.body


def test_a_wait_asks_again_until_the_job_has_ended(api):
    script = Script({"status": "running"}, lost(), {"status": "failed"})
    assert script.run(JobsOf.wait.steps(JobsOf(api, 60.0), "j", timeout_s=40.0))["status"] == "failed"
    assert [request.params["wait"] for request in script.requests] == ["25.000"] * 3
    assert all(request.timeout_s > 25.0 for request in script.requests)
    with pytest.raises(NotEnded):
        Script({"status": "running"}).run(JobsOf.wait.steps(JobsOf(api, 60.0), "j", timeout_s=0.0))


def test_a_listing_ends_where_there_is_no_cursor_and_not_where_a_page_is_empty(api):
    pages: Any = ([], "x"), ([{"job_id": "a"}], "y"), ([], "z"), ([{"job_id": "b"}], None)
    script = Script(*({"jobs": found, "next_cursor": following} for found, following in pages))
    script.run(JobsOf.jobs.steps(JobsOf(api, 60.0), type="rare"))
    assert [job["job_id"] for job in script.emitted] == ["a", "b"]
    assert [request.params["cursor"] for request in script.requests] == [None, "x", "y", "z"]


def test_leases_are_all_of_them(api):
    pages: Any = ([{"lease": "a"}], "x"), ([], "y"), ([{"lease": "b"}], None)
    script = Script(*({"leases": found, "next_cursor": following} for found, following in pages))
    assert script.run(JobsOf.leases.steps(JobsOf(api, 60.0))) == [{"lease": "a"}, {"lease": "b"}]
    assert [request.params["cursor"] for request in script.requests] == [None, "x", "y"]
    assert Script({"leases": []}).run(JobsOf.leases.steps(JobsOf(api, 60.0))) == []


def test_workflows(api):
    flows = WorkflowsOf(api, 60.0)
    script = Script({}, {}, {}, {}, {})
    script.run(WorkflowsOf.create.steps(flows, [{"name": "a", "type": "echo"}], name="nightly"))
    script.run(WorkflowsOf.add_tasks.steps(flows, "w 1", [{"name": "b"}]))
    script.run(WorkflowsOf.cancel.steps(flows, "w"))
    script.run(WorkflowsOf.retry_failed.steps(flows, "w"))
    script.run(WorkflowsOf.rerun.steps(flows, "w", "b"))
    assert [(request.method, request.path) for request in script.requests] == [
        ("POST", "/workflows"),
        ("POST", "/workflows/w%201/tasks"),
        ("POST", "/workflows/w/cancel"),
        ("POST", "/workflows/w/retry_failed"),
        ("POST", "/workflows/w/rerun"),
    ]
    made, *_, again = script.requests
    assert isinstance(made.body, dict) and made.body["name"] == "nightly"
    assert str(made.body["workflow_id"]).startswith("flow-")
    assert again.body == {"task": "b"}


def test_a_workflow_is_looked_at_less_and_less_often(api):
    script = Script(*[{"status": "running"}] * 20, {"status": "done"}, {"status": "done", "tasks": []})
    ended = script.run(WorkflowsOf.wait.steps(WorkflowsOf(api, 60.0), "w"))
    assert ended == {"status": "done", "tasks": []}
    assert (script.pauses[0], script.pauses[-1]) == (0.2, 5.0)
    with pytest.raises(NotEnded):
        Script({"status": "running"}).run(WorkflowsOf.wait.steps(WorkflowsOf(api, 60.0), "w", timeout_s=0.0))


# --- whoever performs them ---


def test_a_cancelled_token_ends_an_operation(api):
    token = Cancellation()
    token.cancel("enough")

    def patient() -> Operation[None]:
        yield Pause(60.0)

    with pytest.raises(Aborted, match="enough"):
        api.run(patient(), token)


def test_a_pause_tells_whether_it_was_stopped(api):
    stop = Cancellation()
    stop.cancel()

    def patient() -> Operation[bool]:
        stopped: bool = yield Pause(60.0, stop)
        return stopped

    assert api.run(patient()) is True
