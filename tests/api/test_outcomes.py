"""POST /jobs/wait: what became of many jobs, in one request."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestrator.api import outcomes, waiters
from orchestrator.jobs import ErrorKind
from tests.api.conftest import Running
from tests.factories import done, failed, hire
from tests.waiting import wait_until


def ask(api: Running, job_ids: Sequence[str], **given: Any) -> dict[str, Any]:
    answer = api.post("/jobs/wait", {"job_ids": list(job_ids)} | given)
    assert answer.status_code == 200, answer.text
    return answer.json()


def end(api: Running, job_ids: Sequence[str], result: str = '{"answer":42}') -> None:
    hand = hire(api.db)
    for claim in hand.claim(*job_ids):
        hand.record(ends=[done(claim, result)])


def test_those_that_ended_are_told_with_their_results_and_without_their_payloads(api: Running) -> None:
    ids = [api.submit(payload={"n": n}, tags=["a"]) for n in range(4)]
    end(api, ids[1:3])
    hand = hire(api.db)
    [claim] = hand.claim(ids[3])
    hand.record(ends=[failed(claim, ErrorKind.PERMANENT)])
    answer = ask(api, [*ids, "none"])
    assert [(job["job_id"], job["status"]) for job in answer["jobs"]] == [
        (ids[1], "done"),
        (ids[2], "done"),
        (ids[3], "failed"),
    ]
    assert (answer["unknown"], answer["more"]) == (["none"], False)
    first, _, last = answer["jobs"]
    assert (first["result"], first["run_seconds"], first["tags"]) == ({"answer": 42}, 0.5, ["a"])
    assert "payload" not in first and "result" not in last and last["last_error"]
    assert ask(api, ids[:1]) == {"jobs": [], "more": False, "unknown": []}


def test_it_waits_for_the_first_of_them(api: Running) -> None:
    ids = [api.submit() for _ in range(3)]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, api, ids, wait=20)
        wait_until(lambda: len(api.backend.waiters), what="somebody waits")
        end(api, ids[1:2])
        assert [job["job_id"] for job in answer.result(10)["jobs"]] == ids[1:2]
    assert len(api.backend.waiters) == 0 and api.backend.waiters._keys == 0


def test_an_answer_has_no_more_than_fits(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [api.submit() for _ in range(5)]
    end(api, ids, '"%s"' % ("x" * 100))
    monkeypatch.setattr(outcomes, "MAX_RECORDS", 3)
    answer = ask(api, ids)
    assert ([job["job_id"] for job in answer["jobs"]], answer["more"]) == (ids[:3], True)
    monkeypatch.setattr(outcomes, "MAX_RESULTS", 250)
    assert [job["job_id"] for job in ask(api, ids)["jobs"]] == ids[:2]
    monkeypatch.setattr(outcomes, "MAX_RESULTS", 10)
    answer = ask(api, ids[4:])
    assert ([job["job_id"] for job in answer["jobs"]], answer["more"]) == (ids[4:], False), "one at least"


def test_bad_questions_are_refused(api: Running) -> None:
    ids = [api.submit()]
    bodies: list[dict[str, Any]] = [
        {},
        {"job_ids": []},
        {"job_ids": ids * 1001},
        {"job_ids": "x"},
        {"job_ids": ["a b"]},
        {"job_ids": ids, "wait": -1},
        {"job_ids": ids, "more": 1},
    ]
    for body in bodies:
        answer = api.post("/jobs/wait", body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input"), body


def test_what_is_waited_for_is_counted(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [api.submit() for _ in range(3)]
    monkeypatch.setattr(waiters, "MAX_WAITERS", 2)
    answer = api.post("/jobs/wait", {"job_ids": ids, "wait": 5})
    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert ask(api, ids[:2], wait=0.05)["jobs"] == []


def test_the_same_id_twice_is_one_job(api: Running) -> None:
    ids = [api.submit()]
    end(api, ids)
    assert len(ask(api, ids * 2)["jobs"]) == 1
