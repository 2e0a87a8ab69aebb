"""`Client` and `AsyncClient` against a real orchestrator: the same tests for both."""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from orchestrator.client import (
    AsyncClient,
    Client,
    JobsRefused,
    LeaseLost,
    NotEnded,
    Refused,
    ServerUnreachable,
    answers,
    interrupt,
    nouns,
    patience,
    submitting,
    wondering,
)
from orchestrator.client.operations import operation, streaming
from orchestrator.errors import ConfigError, JobNotFound
from orchestrator.jobs import ErrorKind
from orchestrator.settings import Settings
from orchestrator.store import paging, schema
from tests.api.conftest import Running
from tests.client.conftest import NODE, Orchestrator
from tests.cluster import Cluster
from tests.factories import Hand, done, failed, hire, rows
from tests.proxy import Proxy
from tests.servers import free_port
from tests.tables import make_tables
from tests.waiting import wait_until

WAIT_S = 30.0
JOB = {"type": "echo", "payload": {}}


class InThreads:
    """A client as a test sees it: every call returns, every stream is a plain iterator."""

    def __init__(self, url: str | None = None, **given: Any) -> None:
        self._client = Client(url, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        self._client.close()


class InALoop:
    """The same for the asynchronous one, whose loop runs in a thread of its own."""

    def __init__(self, url: str | None = None, **given: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client-loop")
        self._thread.start()
        self._client = AsyncClient(url, **given)

    def __getattr__(self, name: str) -> Any:
        return Awaited(self._loop, getattr(self._client, name))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(WAIT_S)
        left = [task.get_name() for task in asyncio.all_tasks(self._loop)]
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
        assert left == [], "nothing runs on"


class Awaited:
    def __init__(self, loop: asyncio.AbstractEventLoop, target: Any) -> None:
        self._loop, self._target = loop, target

    def __getattr__(self, name: str) -> Any:
        return Awaited(self._loop, getattr(self._target, name))

    def __call__(self, *args: Any, **given: Any) -> Any:
        answer = self._target(*args, **given)
        return self._iterate(answer) if isinstance(answer, AsyncIterator) else self._await(answer)

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def _iterate(self, stream: Any) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(stream, StopIteration)

        try:
            while (item := self._await(following())) is not StopIteration:
                yield item
        finally:
            self._await(stream.aclose())


@pytest.fixture(params=[InThreads, InALoop], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`connect(url, patience_s=…)`: a client of either kind, closed by the test's end."""
    opened: list[Any] = []

    def make(*args: Any, **given: Any) -> Any:
        opened.append(request.param(*args, **given))
        return opened[-1]

    yield make
    for client in opened:
        client.close()
    ours = lambda: [one.name for one in threading.enumerate() if re.fullmatch(r"submit-\d+", one.name)]
    wait_until(lambda: not ours(), what=lambda: f"threads end: {ours()}")


@pytest.fixture
def api(started: Running) -> Iterator[Running]:
    yield started
    started.http.delete("/policies/agents/polite")
    with started.db.engine.begin() as connection:
        about_jobs = (schema.task_edges, schema.task_stages, schema.dead_letters, schema.results)
        for table in (*about_jobs, schema.jobs, schema.workflows, schema.rate_buckets):
            connection.execute(table.delete())


@pytest.fixture
def client(connect: Callable[..., Any], api: Running) -> Any:
    return connect(str(api.http.base_url))


@pytest.fixture
def proxied(api: Running, connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Proxy]]:
    monkeypatch.setattr(patience, "RETRY_S", 0.05)
    with Proxy(int(api.http.base_url.port or 0)) as proxy:
        yield connect(f"http://127.0.0.1:{proxy.port}"), proxy


def jobs(count: int, **fields: Any) -> Iterator[dict[str, Any]]:
    return ({"type": "echo", "payload": {"n": n}} | fields for n in range(count))


def stored(api: Running) -> list[str]:
    return [job.job_id for job in rows(api.db, schema.jobs)]


def finish(api: Running, job_ids: Iterable[str], result: str = '{"answer":42}') -> None:
    hand = hire(api.db)
    for claim in hand.claim(*job_ids):
        hand.record(ends=[done(claim, result)])


# --- jobs ---


def test_one_job_from_its_submit_to_its_end(client: Any, api: Running) -> None:
    answer = client.submit(JOB | {"tags": ["a"], "priority": "LOW"})
    assert (answer["status"], answer["created"]) == ("pending", True)
    job_id = answer["job_id"]
    assert client.submit(JOB | {"job_id": job_id, "tags": ["a"], "priority": "LOW"})["created"] is False
    assert client.get(job_id)["payload"] == {}
    assert client.set_priority(job_id, "HIGH")["before"] < 0
    assert client.explain(job_id)["status"] == "pending"
    wait_until(lambda: client.stats()["status"]["pending"] == 1, what="it is counted, within a second")
    with pytest.raises(NotEnded, match=f"'{job_id}' has not ended within 0.05 s") as late:
        client.wait(job_id, timeout_s=0.05)
    assert late.value.waiting == [job_id]
    assert issubclass(NotEnded, TimeoutError)
    finish(api, [job_id])
    assert client.wait(job_id)["result"] == {"answer": 42}
    assert client.events(job_id)[0]["event_type"] == "job.submitted"
    assert [job["job_id"] for job in client.jobs(status="done")] == [job_id]
    with pytest.raises(Refused, match="409 job_ended"):
        client.cancel(job_id)


def test_a_job_that_waits_is_cancelled_and_started_over(client: Any, api: Running) -> None:
    job_id = client.submit(JOB)["job_id"]
    assert client.cancel(job_id)["status"] == "cancelled"
    assert client.cancel(job_id)["status"] == "cancelled"
    assert client.retry(job_id)["redrives"] == 1
    with pytest.raises(Refused, match="409 not_redrivable"):
        client.retry(job_id)


def test_what_the_server_refuses_is_said_with_its_code(client: Any) -> None:
    with pytest.raises(Refused) as refused:
        client.get("none")
    assert (refused.value.status, refused.value.code) == (404, "job_not_found")
    with pytest.raises(Refused, match="422 invalid_input"):
        client.submit({"type": "echo"})


def test_a_wait_hears_of_the_end_at_once(client: Any, api: Running) -> None:
    job_id = client.submit(JOB)["job_id"]
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(client.wait(job_id, timeout_s=WAIT_S)), name="waits")
    thread.start()
    wait_until(lambda: len(api.backend.waiters), what="somebody waits")
    finish(api, [job_id])
    thread.join(WAIT_S)
    assert heard[0]["status"] == "done"


def test_lists_go_on_over_pages(client: Any, api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nouns, "PAGE", 3)
    client.submit_many(jobs(8, agent="lister"))
    client.submit(JOB)
    assert len({job["job_id"] for job in client.jobs(agent="lister")}) == 8


def test_lists_go_on_over_pages_in_which_nothing_is(client: Any, api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "WINDOW", 4)
    rare = [client.submit(JOB | {"type": "rare"})["job_id"]]
    client.submit_many(jobs(10))
    rare.insert(0, client.submit(JOB | {"type": "rare"})["job_id"])
    client.submit_many(jobs(10))
    assert [job["job_id"] for job in client.jobs(type="rare")] == rare


def test_dead_letters_and_workflows_go_on_likewise(client: Any, api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "WINDOW", 2)
    task = JOB | {"name": "t"}
    flows = [client.workflows.create([task], agent="ann" if n in (0, 4) else "bob")["workflow_id"] for n in range(5)]
    client.workflows.cancel(flows[4])
    client.workflows.cancel(flows[0])
    hers = [one["workflow_id"] for one in client.workflows.list(status="cancelled", agent="ann")]
    assert hers == [flows[4], flows[0]]
    ids = [client.submit(JOB | {"max_attempts": 1, "agent": "ann" if n == 0 else "bob"})["job_id"] for n in range(5)]
    bury(api, hire(api.db), ids)
    assert [letter["job_id"] for letter in client.dlq.list(agent="ann")] == ids[:1]
    assert client.dlq.redrive(agent="ann")["redriven"] == 1


def test_lists_can_be_of_a_tag(client: Any) -> None:
    mine = client.submit(JOB | {"tags": ["a/b & ü", "x"]})["job_id"]
    client.submit(JOB | {"tags": ["a/b & Ü"]})
    assert [job["job_id"] for job in client.jobs(tag="a/b & ü")] == [mine]


def test_an_address_that_is_none() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError):
            kind("nonsense")


def test_answers_have_what_their_types_say(connect: Callable[..., Any], api: Running, server: Orchestrator) -> None:
    client = connect(server.url)
    submitted = client.submit(JOB | {"max_attempts": 1})
    job_id = submitted["job_id"]
    explained = client.explain(job_id)
    moved = client.set_priority(job_id, 1)
    bury(api, hire(api.db), [job_id])
    pool = client.pools.create("typed", desired_workers=0)
    listed = next(one for one in client.pools.list() if one["pool_id"] == "typed")
    with client._client.lease(min_memory_mb=1):
        [held] = client.leases()
    found: list[tuple[Any, Any]] = [
        (answers.Submitted, submitted),
        (answers.Explanation, explained),
        (answers.Prioritized, moved),
        (answers.Job, client.get(job_id)),
        (answers.Job, next(client.as_completed([job_id]))),
        (answers.Event, client.events(job_id)[0]),
        (answers.Stats, client.stats()),
        (answers.DeadLetter, next(client.dlq.list())),
        (answers.Redriven, client.dlq.redrive(dry_run=True)),
        (answers.Retried, client.retry(job_id)),
        (answers.Cancelled, client.cancel(job_id)),
        (answers.Purged, client.dlq.purge()),
        (answers.Pool, pool),
        (answers.Pool, listed),
        (answers.PoolState, client.pools.evict("typed")),
        (answers.Deleted, client.pools.delete("typed")),
        (answers.Lease, held),
    ]
    missing = {kind.__name__: kind.__required_keys__ - answer.keys() for kind, answer in found}
    assert {name: keys for name, keys in missing.items() if keys} == {}


# --- many jobs ---


def test_many_jobs_get_in_in_batches_and_in_order(client: Any, api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "BATCH", 7)
    answers = client.submit_many(jobs(50))
    assert [answer["created"] for answer in answers] == [True] * 50
    in_order = sorted(rows(api.db, schema.jobs), key=lambda job: job.rank)
    assert [job.job_id for job in in_order] == [answer["job_id"] for answer in answers]
    assert len(client.submit_many(jobs(30), threads=4)) == 30
    assert len(set(stored(api))) == 80
    assert client.submit_many([]) == []


def test_a_stream_takes_no_more_than_is_on_its_way(client: Any, api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "BATCH", 2)
    taken: list[int] = []

    def endless() -> Iterator[dict[str, Any]]:
        for n in range(100_000):
            taken.append(n)
            yield JOB | {"job_id": f"s-{n}"}

    answers = client.submit_stream(endless())
    assert [next(answers)["job_id"] for _ in range(5)] == [f"s-{n}" for n in range(5)]
    answers.close()
    assert len(taken) < 100, "eight batches of two at most are in the house"


def test_what_was_refused_is_said_job_by_job(client: Any, api: Running) -> None:
    bad = {"type": "echo"}
    with pytest.raises(JobsRefused, match="1 of 3 jobs were refused; the first with invalid_input") as refused:
        client.submit_many([JOB, bad, JOB])
    assert ["error" in answer for answer in refused.value.answers] == [False, True, False]
    streamed = [answer.get("error", {}).get("code") for answer in client.submit_stream([JOB, bad])]
    assert streamed == [None, "invalid_input"]


def test_one_body_that_spoils_its_request_is_found(client: Any, api: Running) -> None:
    spoiled = {"type": "echo", "payload": {"x": float("nan")}}
    with pytest.raises(JobsRefused, match="1 of 9") as refused:
        client.submit_many([*jobs(5), spoiled, *jobs(3)])
    assert [n for n, answer in enumerate(refused.value.answers) if "error" in answer] == [5]
    assert len(stored(api)) == 8


def test_items_that_break_off_are_an_error(client: Any, api: Running) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield JOB
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        client.submit_many(broken())


def test_a_rate_is_obeyed(client: Any, api: Running) -> None:
    api.http.put("/policies/agents/polite", json={"rate": 20}).raise_for_status()
    told: list[str] = []
    before = time.monotonic()
    answers = client.submit_many(jobs(40, agent="polite"), on_wait=told.append)
    assert time.monotonic() - before > 0.9, "20 of them had to wait for their tokens"
    assert all(answer["created"] for answer in answers) and len(stored(api)) == 40
    assert any("polite" in reason for reason in told)


def test_who_would_have_to_wait_too_long_hears_so_at_once(client: Any, api: Running) -> None:
    api.http.put("/policies/agents/polite", json={"rate": 0.001, "burst": 1}).raise_for_status()
    client.submit(JOB | {"agent": "polite"})
    with pytest.raises(Refused, match="429 rate_limited"):
        client.submit(JOB | {"agent": "polite"}, patience_s=5)
    with pytest.raises(JobsRefused, match="2 of 2"):
        client.submit_many(jobs(2, agent="polite"), patience_s=5)


# --- results as they come ---


def test_a_thousand_jobs_as_they_complete(client: Any, api: Running) -> None:
    ids = [answer["job_id"] for answer in client.submit_many(jobs(1000))]
    requests = count_requests(api)
    hand = hire(api.db)

    def work() -> None:
        for start in range(0, 1000, 100):
            claims = hand.claim(*ids[start : start + 100])
            hand.record(ends=[done(claim, json.dumps({"n": claim.job_id})) for claim in claims])

    worker = threading.Thread(target=work, name="works")
    worker.start()
    ended = list(client.as_completed(ids, timeout_s=WAIT_S))
    worker.join(WAIT_S)
    assert sorted(job["job_id"] for job in ended) == sorted(ids)
    assert all(job["result"] == {"n": job["job_id"]} for job in ended)
    assert requests() <= 30, "not one request for each job"


def count_requests(api: Running) -> Callable[[], int]:
    before = api.server.server_state.total_requests
    return lambda: api.server.server_state.total_requests - before


def test_more_jobs_than_one_request_asks_about_take_turns(
    client: Any, api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nouns, "ASK_ABOUT", 4)
    monkeypatch.setattr(nouns, "TURN_S", 0.05)
    ids = [answer["job_id"] for answer in client.submit_many(jobs(10))]
    finish(api, ids[7:])
    stream = client.as_completed(iter(ids), timeout_s=WAIT_S)
    assert {next(stream)["job_id"] for _ in range(3)} == set(ids[7:])
    finish(api, ids[:7])
    assert {job["job_id"] for job in stream} == set(ids[:7])


def test_what_does_not_end_in_time_is_named(client: Any, api: Running) -> None:
    ids = [answer["job_id"] for answer in client.submit_many(jobs(3))]
    finish(api, ids[:1])
    stream = client.as_completed(ids, timeout_s=0.1)
    assert next(stream)["job_id"] == ids[0]
    with pytest.raises(NotEnded, match=r"2 of 3 have not ended within 0.1 s") as late:
        next(stream)
    assert late.value.waiting == ids[1:]
    with pytest.raises(JobNotFound, match="none"):
        list(client.as_completed([ids[0], "none"]))
    assert list(client.as_completed([])) == []


def test_who_gave_up_waiting_hears_why_the_job_waits(client: Any, api: Running) -> None:
    job_id, other = (answer["job_id"] for answer in client.submit_many(jobs(2, pool_id="none")))
    with pytest.raises(NotEnded, match=r"has not ended within 0.1 s: no live worker serves pool none;"):
        client.wait(job_id, timeout_s=0.1)
    with pytest.raises(
        NotEnded, match=rf"2 of 2 have not ended within 0.1 s: {job_id}: no live worker serves pool none;"
    ):
        list(client.as_completed([job_id, other], timeout_s=0.1))
    runs = client.submit(JOB)["job_id"]
    hire(api.db).claim(runs)
    with pytest.raises(NotEnded, match=r"has not ended within 0.1 s; wait again, or cancel"):
        client.wait(runs, timeout_s=0.1)


@pytest.mark.parametrize("what", ["wait", "as_completed"])
def test_whoever_waits_is_told_why_once(what: str, client: Any, api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wondering, "WONDER_S", 0.05)
    monkeypatch.setattr(wondering, "AGAIN_S", 0.05)
    job_id = client.submit(JOB | {"pool_id": "none"})["job_id"]
    told: list[str] = []
    with pytest.raises(NotEnded):
        if what == "wait":
            client.wait(job_id, timeout_s=1.0, on_wait=told.append)
        else:
            list(client.as_completed([job_id], timeout_s=1.0, on_wait=told.append))
    assert len(told) == 1 and "no live worker serves pool none" in told[0]


def test_of_many_that_run_the_one_that_waits_is_told(
    client: Any, api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wondering, "WONDER_S", 0.05)
    running = client.submit(JOB)["job_id"]
    hire(api.db).claim(running)
    stuck = client.submit(JOB | {"pool_id": "none"})["job_id"]
    told: list[str] = []
    with pytest.raises(NotEnded, match=stuck):
        list(client.as_completed([running, stuck], timeout_s=1.0, on_wait=told.append))
    assert len(told) == 1 and told[0].startswith(f"{stuck}: no live worker serves pool none")


# --- servers that fail ---


def test_a_lost_answer_costs_no_second_job(proxied: tuple[Any, Proxy], api: Running) -> None:
    client, proxy = proxied
    client.stats()
    proxy.lose_reply()
    assert client.submit(JOB)["created"] is False, "it was stored by the request whose answer got lost"
    proxy.lose_reply()
    assert [answer["created"] for answer in client.submit_many(jobs(5))] == [False] * 5
    assert len(stored(api)) == 6


def test_what_cannot_be_repeated_is_not(proxied: tuple[Any, Proxy], api: Running) -> None:
    client, proxy = proxied
    job_id = client.submit(JOB)["job_id"]
    client.cancel(job_id)
    proxy.lose_reply()
    with pytest.raises(ServerUnreachable):
        client.retry(job_id)
    assert client.get(job_id)["redrives"] == 1
    proxy.lose_reply()
    assert client.cancel(job_id)["status"] == "cancelled", "this may be, and is"


def test_a_wait_survives_a_server_that_goes_away(proxied: tuple[Any, Proxy], api: Running) -> None:
    client, proxy = proxied
    ids = [answer["job_id"] for answer in client.submit_many(jobs(2))]
    heard: list[Any] = []

    def wait() -> None:
        heard.append(client.wait(ids[0], timeout_s=WAIT_S))
        heard.extend(client.as_completed(ids, timeout_s=WAIT_S))

    thread = threading.Thread(target=wait, name="waits")
    thread.start()
    wait_until(lambda: len(api.backend.waiters), what="somebody waits")
    proxy.refuse()
    wait_until(lambda: not len(api.backend.waiters), what="nobody waits any more")
    finish(api, ids[:1])
    proxy.heal()
    wait_until(lambda: heard, what="it was heard of")
    wait_until(lambda: len(api.backend.waiters), what="somebody waits for the rest")
    proxy.cut()
    finish(api, ids[1:])
    thread.join(WAIT_S)
    assert [job["job_id"] for job in heard] == [ids[0], *ids]


def test_a_server_that_does_not_come_back_is_an_error(proxied: tuple[Any, Proxy], api: Running) -> None:
    client, proxy = proxied
    job_id = client.submit(JOB)["job_id"]
    proxy.refuse()
    before = time.monotonic()
    with pytest.raises(ServerUnreachable):
        client.wait(job_id, timeout_s=0.3)
    with pytest.raises(JobsRefused, match="3 of 3 jobs were refused; the first with server_unreachable") as refused:
        client.submit_many(jobs(3), patience_s=0.3)
    assert all(answer["job_id"] for answer in refused.value.answers), "they may be sent again by these"
    assert time.monotonic() - before < WAIT_S


def test_nobody_waits_for_a_server_that_never_answered(connect: Callable[..., Any]) -> None:
    client = connect(f"http://127.0.0.1:{free_port()}")
    for call in (client.stats, lambda: client.submit(JOB), lambda: client.submit_many([JOB]), client.pools.create):
        with pytest.raises(ServerUnreachable):
            call()


@contextmanager
def restartable(settings: Settings, tmp_path: Path) -> Iterator[Cluster]:
    own = settings.model_copy(update={"database_url": f"sqlite:///{tmp_path / 'cluster.db'}"})
    cluster = Cluster(own, tmp_path, forked=True)
    try:
        make_tables(cluster.db.engine)
        yield cluster
    finally:
        cluster.close()


def test_a_restart_amid_many_jobs_loses_none_and_doubles_none(
    connect: Callable[..., Any], cluster_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "BATCH", 20)
    with restartable(cluster_settings, tmp_path) as cluster:
        port = free_port()
        first, url = cluster.serve(port=port)
        killed = threading.Event()

        def kill_amid() -> Iterator[dict[str, Any]]:
            for n in range(600):
                if n == 300:
                    first.kill()
                    killed.set()
                yield JOB | {"payload": {"n": n}}

        restart = threading.Thread(target=lambda: killed.wait(WAIT_S) and cluster.serve(port=port), name="restart")
        restart.start()
        answers = connect(url).submit_many(kill_amid(), threads=2, patience_s=60)
        restart.join(WAIT_S)
        query = select(schema.jobs.c.job_id, schema.jobs.c.payload)
        found = cluster.db.read(lambda conn: {row.job_id: row.payload for row in conn.execute(query)})
        assert len(answers) == len(found) == 600
        assert [json.loads(found[answer["job_id"]])["n"] for answer in answers] == list(range(600))


# --- pools, dead letters, leases ---


def test_a_pool_from_its_creation_to_its_end(client: Any, api: Running) -> None:
    pool = client.pools.create("chat", type="echo", desired_workers=1)
    assert (pool["status"], pool["created"]) == ("starting", True)
    assert client.pools.create("chat", type="echo", desired_workers=1)["created"] is False
    assert client.pools.create(desired_workers=0)["pool_id"].startswith("pool-")
    assert client.pools.scale("chat", 3)["desired_workers"] == 3
    assert client.pools.change("chat", hold_seconds=5)["hold_seconds"] == 5
    assert client.pools.show("chat")["assignments"] == []
    assert "chat" in [pool["pool_id"] for pool in client.pools.list()]
    assert client.pools.drain("chat", timeout_s=1)["status"] in ("draining", "stopped")
    assert client.pools.evict("chat")["status"] in ("stopped", "evicted")
    for pool in list(client.pools.list()):
        client.pools.evict(pool["pool_id"])
        assert client.pools.delete(pool["pool_id"])["deleted"] is True
    with pytest.raises(Refused, match="404 pool_not_found"):
        client.pools.show("chat")


def test_a_workflow_from_its_creation_to_its_end(client: Any, api: Running) -> None:
    tasks = [JOB | {"name": "a"}, JOB | {"name": "b", "depends_on": ["a"]}]
    made = client.workflows.create(tasks, name="nightly")
    flow = made["workflow_id"]
    assert (made["status"], made["created"]) == ("running", True)
    assert client.workflows.create(tasks, flow, name="nightly")["created"] is False
    client.workflows.add_tasks(flow, [JOB | {"name": "c", "depends_on": ["b"]}])
    assert flow in [one["workflow_id"] for one in client.workflows.list(status="running")]
    with pytest.raises(NotEnded, match=flow):
        client.workflows.wait(flow, timeout_s=0.05)
    ids = {task["name"]: task["job_id"] for task in client.workflows.get(flow)["tasks"]}
    for name in "abc":
        finish(api, [ids[name]])
    assert client.workflows.wait(flow, timeout_s=WAIT_S)["status"] == "done"
    assert client.workflows.rerun(flow, "c")["status"] == "running"
    assert client.workflows.cancel(flow)["status"] == "cancelled"
    assert client.workflows.retry_failed(flow)["status"] == "running"
    client.workflows.cancel(flow)


def test_dead_letters_are_listed_started_over_and_forgotten(client: Any, api: Running) -> None:
    ids = [answer["job_id"] for answer in client.submit_many(jobs(3, max_attempts=1))]
    bury(api, hire(api.db), ids)
    assert {letter["job_id"] for letter in client.dlq.list(type="echo")} == set(ids)
    assert client.dlq.redrive(dry_run=True, type="echo")["would_be"] == 3
    assert client.dlq.redrive(job_ids=ids[:1])["redriven"] == 1
    assert client.dlq.purge(max=1)["purged"] == 1
    assert client.dlq.purge(agent=None)["purged"] == 1


def bury(api: Running, hand: Hand, job_ids: list[str]) -> None:
    for claim in hand.claim(*job_ids):
        hand.record(ends=[failed(claim, ErrorKind.TRANSIENT)])


def test_a_lease_through_the_client(client: Any, server: Orchestrator) -> None:
    lease = client._client.lease(min_memory_mb=1000, agent="alice", ttl_seconds=30)
    with lease as held:
        assert held.gpu_uuids == ("GPU-0",)
        assert [(one["agent_name"], one["memory_mb"]) for one in client.leases()] == [("alice", 1000)]
    assert server.leases() == []


# --- in an event loop ---


def in_loop(scenario: Callable[[AsyncClient], Any], url: str) -> Any:
    async def main() -> Any:
        async with AsyncClient(url) as client:
            answer = await scenario(client)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing runs on"
        return answer

    return asyncio.run(main())


def test_an_async_iterable_is_taken_as_it_comes(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "BATCH", 3)

    async def coming() -> AsyncIterator[dict[str, Any]]:
        for job in jobs(10):
            await asyncio.sleep(0)
            yield job

    async def scenario(client: AsyncClient) -> list[Any]:
        return await client.submit_many(coming(), threads=3)

    answers = in_loop(scenario, str(api.http.base_url))
    assert sorted(answer["job_id"] for answer in answers) == sorted(stored(api)) and len(answers) == 10
    with Client(str(api.http.base_url)) as client, pytest.raises(TypeError, match="AsyncClient"):
        client.submit_many(coming())


@pytest.mark.parametrize("what", ["submit_many", "wait", "as_completed"])
def test_who_is_cancelled_leaves_nothing_running(api: Running, what: str) -> None:
    api.http.put("/policies/agents/polite", json={"rate": 0.01, "burst": 1}).raise_for_status()
    told: list[str] = []

    async def consume(client: AsyncClient, job_id: str) -> None:
        if what == "submit_many":
            await client.submit_many(jobs(5, agent="polite"), patience_s=1e6, on_wait=told.append)
        elif what == "wait":
            await client.wait(job_id)
        else:
            async for _ in client.as_completed([job_id]):
                pass

    async def scenario(client: AsyncClient) -> None:
        job_id = (await client.submit(JOB | {"agent": "polite"}))["job_id"]
        task = asyncio.create_task(consume(client, job_id))
        await asyncio.to_thread(wait_until, lambda: told or len(api.backend.waiters), what="it waits")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    in_loop(scenario, str(api.http.base_url))
    wait_until(lambda: not len(api.backend.waiters), what="the server waits for nobody")


def test_tasks_share_a_client(api: Running) -> None:
    async def scenario(client: AsyncClient) -> list[Any]:
        answers = await asyncio.gather(*(client.submit(JOB) for _ in range(20)))
        return [await client.get(answer["job_id"]) for answer in answers]

    assert len(in_loop(scenario, str(api.http.base_url))) == 20


def test_a_lease_of_a_task(server: Orchestrator) -> None:
    async def scenario(client: AsyncClient) -> None:
        async with client.lease(min_memory_mb=1, ttl_seconds=30) as held:
            assert held.node_id == NODE
            assert len(await client.leases()) == 1

    in_loop(scenario, server.url)
    assert server.leases() == []


def test_a_task_hears_that_its_lease_is_lost(server: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.client.keeper.BEAT", 1 / 30)  # soon, and yet no busy machine costs the lease

    async def scenario(client: AsyncClient) -> str:
        try:
            async with client.lease(min_memory_mb=1, ttl_seconds=30):
                await asyncio.to_thread(server.end_leases)
                await asyncio.sleep(600)
        except LeaseLost as lost:
            current = asyncio.current_task()
            assert current is not None and not current.cancelling(), "it may go on"
            await asyncio.sleep(0)
            return lost.reason
        return "not raised"

    assert "410 lease_ended" in in_loop(scenario, server.url)


def test_a_task_may_run_before_the_loss_is_known_to_all(server: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled a moment before the event is set, and may have left its block by then."""
    send = interrupt.InTask.send

    def slowly(self: interrupt.InTask, reason: str) -> None:
        send(self, reason)
        time.sleep(0.3)

    monkeypatch.setattr(interrupt.InTask, "send", slowly)
    test_a_task_hears_that_its_lease_is_lost(server, monkeypatch)


def test_a_task_that_is_cancelled_gives_its_lease_back(server: Orchestrator) -> None:
    async def hold(client: AsyncClient, held: asyncio.Event) -> None:
        async with client.lease(min_memory_mb=1, ttl_seconds=30):
            held.set()
            await asyncio.sleep(600)

    async def scenario(client: AsyncClient) -> None:
        held = asyncio.Event()
        task = asyncio.create_task(hold(client, held))
        await asyncio.wait_for(held.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(scenario, server.url)
    assert server.leases() == []


# --- one description, two clients ---


def test_both_have_the_same_operations() -> None:
    ours = {name for name in dir(Client) if isinstance(getattr(Client, name), operation | streaming)}
    assert ours == {name for name in dir(AsyncClient) if isinstance(getattr(AsyncClient, name), operation | streaming)}
    assert {"submit", "submit_many", "as_completed", "wait", "explain"} <= ours
    assert all(getattr(Client, name).__doc__ for name in ours), "help() tells of each"


def test_a_client_is_closed_by_its_block(api: Running) -> None:
    with Client(str(api.http.base_url)) as client:
        client.stats()
    with pytest.raises(RuntimeError, match="closed"):
        client.stats()
