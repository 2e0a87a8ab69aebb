"""A supervisor's posts: one that cannot be manned, or breaks, is no trouble of the others, and is tried again."""

import threading
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from worker import supervisor as module
from worker.post import Post
from worker.supervisor import LONGEST_PAUSE_S, Duty, Supervisor


class FakeService:
    """Notes what it is told; cannot be started, or told anything, while its pool is in `broken`."""

    made: list["FakeService"]
    broken: set[str]

    def __init__(self, post: Post, _new_session: Any) -> None:
        self.post = post
        self.types: tuple[str, ...] = ()
        self.leaving = False
        self.warm = True
        self.over = threading.Event()
        self.told: list[str] = []
        self.made.append(self)

    def start(self) -> None:
        self._hear("start", RuntimeError("can't start new thread"))

    def resize(self, _slots: int) -> None:
        self._hear("resize", ZeroDivisionError("a bug"))

    def leave(self, _grace_s: float) -> None:
        self.told.append("leave")

    def join(self) -> bool:
        assert "start" in self.told, "nobody could wait for it"
        return True

    def _hear(self, what: str, error: Exception) -> None:
        if self.post.pool_id in self.broken:
            raise error
        self.told.append(what)


class Clock(SimpleNamespace):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def node() -> SimpleNamespace:
    told: list[str] = []
    return SimpleNamespace(
        node_id="node-1", db=None, told=told, start=lambda: told.append("start"), close=lambda: told.append("close")
    )


@pytest.fixture
def supervise(monkeypatch, settings, node, clock) -> Callable[..., Supervisor]:
    """A supervisor that should man these pools."""

    def new(*pools: str) -> Supervisor:
        FakeService.made, FakeService.broken = [], set()
        monkeypatch.setattr(module, "Service", FakeService)
        monkeypatch.setattr(module, "Node", lambda *_: node)
        one = Supervisor(settings())
        one._duties = [Duty(Post(pool, 1)) for pool in pools]
        return one

    return new


def made(pool: str) -> list[FakeService]:
    return [service for service in FakeService.made if service.post.pool_id == pool]


def test_a_post_that_cannot_be_manned_is_no_trouble_of_the_others(supervise, node, monkeypatch):
    one = supervise("a", "b", "c")
    FakeService.broken = {"b"}
    monkeypatch.setattr(one, "_look", lambda: one.stop() if FakeService.made else one._wake.set())
    one.run()
    assert [made(pool)[0].told for pool in "abc"] == [["start", "resize", "resize", "leave"], [], [*made("a")[0].told]]
    assert node.told == ["start", "close"]


def test_a_post_that_cannot_be_manned_is_tried_again_later_and_later(supervise, clock, caplog):
    one = supervise("a")
    FakeService.broken = {"a"}
    tried = []
    for _ in range(2000):
        before = len(FakeService.made)
        one._converge()
        if len(FakeService.made) > before:
            tried.append(clock.now - 1000.0)
        clock.now += 0.5
    pauses = [later - sooner for sooner, later in pairwise(tried)]
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert set(pauses[6:]) == {LONGEST_PAUSE_S}
    assert [record.pool_id for record in caplog.records] == ["a"] * len(tried)
    FakeService.broken = set()
    clock.now += LONGEST_PAUSE_S
    one._converge()
    assert made("a")[-1].told == ["start", "resize"]


def test_a_node_that_is_drained_is_told_once_each_time(supervise, node, caplog):
    """Whoever starts a worker there should not wonder why it does nothing."""
    one = supervise()
    for leave_s in (None, 9.0, 8.0, 0.0, None, 5.0):
        node.heart = SimpleNamespace(write=lambda _read, answer=leave_s: ([], answer))
        one._look()
    told = [record.reason for record in caplog.records if record.message == "node is drained"]
    assert told == ["no jobs are taken: gpuorch nodes resume node-1"] * 2


def test_a_post_that_breaks_again_and_again_is_manned_later_and_later(supervise, clock):
    one = supervise("a")
    one._converge()
    for pause_s in (1.0, 2.0):
        made("a")[-1].over.set()
        one._converge()
        clock.now += pause_s - 0.1
        one._converge()
        assert made("a")[-1].over.is_set(), "nobody new"
        clock.now += 0.1
        one._converge()
        assert not made("a")[-1].over.is_set()
    made("a")[-1].types = ("echo",)  # its slots are up: what comes next is another trouble
    one._converge()
    made("a")[-1].over.set()
    one._converge()
    clock.now += 1.0
    one._converge()
    assert not made("a")[-1].over.is_set()


def test_a_post_that_left_as_it_was_told_is_manned_again_at_once(supervise):
    one = supervise("a")
    one._converge()
    made("a")[0].leaving = True
    made("a")[0].over.set()
    one._converge()
    assert len(made("a")) == 2


def test_a_post_that_breaks_when_it_is_told_something_keeps_nobody_from_being_told(supervise):
    one = supervise("a", "b", "c")
    one._converge()
    FakeService.broken = {"b"}
    one._converge()
    assert [made(pool)[0].told for pool in "abc"] == [["start"] + n * ["resize"] for n in (2, 1, 2)]
