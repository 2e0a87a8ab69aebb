"""Child processes that are kept alive: started again whenever they end, unless the first one refuses to run."""

import subprocess
import threading

import pytest

from orchestrator import children
from orchestrator.children import Restarter
from tests.waiting import wait_until

REFUSED = 1


@pytest.fixture
def keep(monkeypatch):
    """Children that end one after the other with these codes, or live on when there is none left."""
    monkeypatch.setattr(children, "BACKOFF_S", 0.01)
    kept: list[Restarter] = []

    def start(*codes, on_refused=lambda: None):
        lives = [f"exit {code}" for code in codes]
        stays: list[subprocess.Popen[bytes]] = []

        def spawn():
            life = lives.pop(0) if lives else "exec sleep 600"
            process = subprocess.Popen(["sh", "-c", life], start_new_session=True)
            if not life.startswith("exit"):
                stays.append(process)
            return process

        one = Restarter("test", spawn, 5.0, REFUSED, on_refused)
        kept.append(one)
        one.start()
        return one, lambda: bool(stays) and stays[-1].poll() is None

    yield start
    for one in kept:
        one.stop()


def test_it_is_started_again_however_it_ended(keep):
    child, lives = keep(0, 7, 255)
    wait_until(lives, what="the one that lives on")
    assert (child.code, child.refused) == (255, False)


def test_whoever_wants_to_stop_hears_that_the_first_one_refused(keep):
    heard = threading.Event()
    child, lives = keep(REFUSED, on_refused=heard.set)
    assert heard.wait(10) and child.refused
    wait_until(lives, what="another try, unless it is stopped")


def test_a_later_one_that_ends_like_that_has_only_failed(keep):
    heard = threading.Event()
    child, lives = keep(3, REFUSED, on_refused=heard.set)
    wait_until(lives, what="the one that lives on")
    assert not (child.refused or heard.is_set())


def test_one_that_was_steady_did_not_refuse(keep, monkeypatch):
    monkeypatch.setattr(children, "STEADY_S", 0.0)
    child, lives = keep(REFUSED)
    wait_until(lives, what="the one that lives on")
    assert not child.refused


def test_it_is_tried_again_when_no_process_is_to_be_had(keep):
    child, lives = keep()
    make, failures = child._make, [OSError("no more processes")]

    def sometimes():
        if failures:
            raise failures.pop()
        return make()

    child._make = sometimes
    wait_until(lives, what="the first one")
    child._process.kill()
    wait_until(lambda: not failures and lives(), what="another one")


def test_a_stop_ends_it_and_starts_no_other(keep):
    child, lives = keep()
    wait_until(lives, what="it lives")
    child.stop()
    assert child._process.poll() is not None and child.code is None
    assert not child._thread.is_alive()


def test_one_that_was_never_started_stops_at_once():
    Restarter("test", lambda: subprocess.Popen(["false"]), 5.0).stop()
