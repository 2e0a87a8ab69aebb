"""A session that cannot be made: what there is of it already must not stay, since it is tried again and again."""

import os
import threading

import pytest

from tests.processes import few_files, files
from worker import parts
from worker.intake import Intake
from worker.node import Node
from worker.post import Model, Post
from worker.session import Session
from worker.slots import SlotPool

POST = Post("default", 2, model=Model("echo"))


@pytest.fixture
def node(maria_db, redis_url, settings):
    given = settings(
        database_url=maria_db.settings.database_url,
        redis_url=redis_url,
        gpu_backend="none",
        worker_slots=8,
        worker_handlers=("tests.worker.marking_handlers",),
    )
    opened = Node(given, lambda: None)
    yield opened
    opened.close()


@pytest.fixture
def nothing_stays():
    threads, open_files = set(threading.enumerate()), files(os.getpid())
    yield
    # Those of tests before this one may have ended meanwhile.
    assert set(threading.enumerate()) <= threads
    assert files(os.getpid()).items() <= open_files.items()


@pytest.mark.parametrize("part", ["Spawner", "SlotPool", "Preloader", "Custody", "Ledger", "Intake"])
def test_a_session_without_one_of_its_parts_leaves_nothing(node, nothing_stays, monkeypatch, part):
    def fail(*_given, **_more):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(parts, part, fail)
    with pytest.raises(RuntimeError, match="new thread"):
        Session(node, POST)


@pytest.mark.parametrize("free", range(5))
def test_a_session_without_files_leaves_nothing(node, nothing_stays, free):
    with few_files(os.getpid(), free), pytest.raises(OSError, match="open files"):
        Session(node, POST)


def test_a_session_that_never_began_leaves_nothing(node, nothing_stays):
    Session(node, POST).abandon()


def test_a_slot_that_hangs_is_told_before_what_was_wrong_earlier(node, monkeypatch):
    one = Session(node, POST)
    monkeypatch.setattr(Intake, "trouble", "cannot read")
    assert one._parts.pulse.beat().trouble == "cannot read"
    one._slots.trouble = "no slot could be started"
    assert one._parts.pulse.beat().trouble == "no slot could be started"
    monkeypatch.setattr(SlotPool, "late", "slot 1 loads 'echo'")
    assert one._parts.pulse.beat().trouble == "slot 1 loads 'echo'"
    one.abandon()


def test_a_lane_reaches_as_far_as_the_slots_of_its_post(node, monkeypatch):
    """Not those of the node's own lane."""
    told = []
    monkeypatch.setattr(node.publisher, "reaches", lambda *reach: told.append(reach))
    node.start()
    one = Session(node, Post("gold", 2))
    one.begin()
    one.abandon()
    assert told == [("gold", 2 * one._slots.size_of("marks-many"))] and told[0][1] > 2
