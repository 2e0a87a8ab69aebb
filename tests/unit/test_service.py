"""A post's sessions: what is said between two of them is not lost, and whatever ends one leaves nothing behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.errors import WorkerLost
from tests.waiting import wait_until
from worker.post import Post
from worker.service import Service


class FakeSession:
    """Notes what it was told; `on_begin` is what its beginning does."""

    types = ("echo",)
    worker_id = "host:1:fake"
    lost = False

    def __init__(self, post: Post, on_begin: Callable[[], None] = lambda: None) -> None:
        self.slots = post.slots
        self.over = threading.Event()
        self.told: list[str] = []
        self._on_begin = on_begin

    def begin(self) -> None:
        self.told.append("begin")
        self._on_begin()

    def resize(self, slots: int) -> None:
        self.slots = slots

    def leave(self, _grace_s: float) -> None:
        self.told.append("leave")
        self.over.set()

    def end(self) -> None:
        self.told.append("end")

    def abandon(self) -> None:
        self.told.append("abandon")


def manned(new_session: Callable[[Post], Any]) -> Service:
    service = Service(Post("chat", 1), new_session)
    service.start()
    return service


def test_a_resize_while_a_session_is_being_made_reaches_it():
    made: list[FakeSession] = []

    def new_session(post: Post) -> FakeSession:
        service.resize(3)
        made.append(FakeSession(post))
        return made[-1]

    service = Service(Post("chat", 1), new_session)  # type: ignore[arg-type]
    service.start()
    wait_until(lambda: made and "begin" in made[0].told, what="a session")
    assert made[0].slots == 3
    service.leave(0.0)
    assert service.join(5.0)


def test_who_must_leave_while_a_session_is_being_made_does_not_begin_to_take_jobs():
    made: list[FakeSession] = []

    def new_session(post: Post) -> FakeSession:
        service.leave(0.0)
        made.append(FakeSession(post))
        return made[-1]

    service = Service(Post("chat", 1), new_session)  # type: ignore[arg-type]
    service.start()
    assert service.join(5.0)
    assert made[0].told[:2] == ["leave", "begin"]
    assert made[0].told[-1] == "end"


def declared_dead() -> None:
    raise WorkerLost("worker")


def broken() -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("trouble", [declared_dead, broken])
def test_a_session_that_cannot_begin_leaves_nothing_and_is_followed(trouble):
    """The leader gave it up before its first heartbeat, or there is a bug."""
    made: list[FakeSession] = []

    def new_session(post: Post) -> FakeSession:
        made.append(FakeSession(post, (lambda: None) if made else trouble))
        return made[-1]

    service = manned(new_session)
    wait_until(lambda: len(made) == 2, what="another session")
    assert made[0].told == ["begin", "abandon"]
    service.leave(0.0)
    assert service.join(5.0)


def test_a_post_without_a_session_is_over_and_says_why(caplog):
    def new_session(_post: Post) -> FakeSession:
        raise RuntimeError("can't start new thread")

    service = manned(new_session)
    assert service.join(5.0)
    assert not service.leaving
    assert [(record.message, record.exc_info is not None) for record in caplog.records] == [("post broke", True)]
