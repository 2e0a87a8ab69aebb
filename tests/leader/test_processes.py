"""Leaders as real processes: killed, frozen, and followed."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from orchestrator.store import leadership, schema
from tests.factories import rows
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
NAME = "gpu_orchestrator_leader"

#: Stands for election until it is ended. Once it has led, it writes under that term, again and again. Its term lasts
#: for longer than a busy machine may stop it, and no longer than a test likes to wait for its end.
CANDIDATE = """
import sys, time
from orchestrator.errors import StaleEpoch
from orchestrator.leader.term import Candidate
from orchestrator.settings import Settings
from orchestrator.store import schema
from orchestrator.store.database import Database

url, holder = sys.argv[1:]
settings = Settings(database_url=url, leader_ttl_s=4.0, leader_trust_margin_s=0.5, leader_interval_s=0.1)
candidate, first, writes, stood = Candidate(Database(settings), settings, holder), None, 0, False
while True:
    candidate.tick()
    if not stood:
        stood = True
        print("standing", flush=True)
    if first is None and candidate.term:
        first = candidate.term
        print("leading", first.epoch, flush=True)
    if first is not None:
        try:
            writes += 1
            row = {"lane": f"{holder}-{first.epoch}-{writes}"}
            first.write(lambda conn: conn.execute(schema.lanes.insert(), row))
        except StaleEpoch:
            print("refused", first.epoch, flush=True)
            first = None
    time.sleep(0.1)
"""


class Instance:
    def __init__(self, url: str, holder: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CANDIDATE, url, holder], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            )

    def said(self, what: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(what)]

    def end(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def instance(maria_db, tmp_path):
    with ExitStack() as started:

        def start(holder: str) -> Instance:
            made = Instance(maria_db.settings.database_url, holder, tmp_path / holder)
            started.callback(made.end)
            return made

        yield start


def elected(one):
    (line,) = wait_until(lambda: one.said("leading"), timeout=60, what=f"{one.log.name} leads")[-1:]
    return int(line.split()[1])


def written_by(db, holder):
    return [lane.lane for lane in rows(db, schema.lanes) if lane.lane.startswith(f"{holder}-")]


def test_a_killed_leader_is_followed(maria_db, instance):
    """F-2, INV-20."""
    one = instance("one")
    first = elected(one)
    other = instance("other")
    wait_until(lambda: written_by(maria_db, "one"), what="the leader writes")
    wait_until(lambda: other.said("standing"), timeout=60, what="the other one stands")
    assert other.said("leading") == []
    one.process.kill()
    assert elected(other) == first + 1


def test_a_frozen_leader_loses_its_term_and_its_write_after_waking_is_refused(maria_db, instance):
    """F-4: it wakes up believing that it leads."""
    one = instance("one")
    first = elected(one)
    wait_until(lambda: written_by(maria_db, "one"), what="the leader writes")
    os.kill(one.process.pid, signal.SIGSTOP)
    other = instance("other")
    assert elected(other) == first + 1
    before = written_by(maria_db, "one")
    os.kill(one.process.pid, signal.SIGCONT)
    wait_until(lambda: one.said("refused"), what="the old leader is refused")
    assert written_by(maria_db, "one") == before
    now = maria_db.read(lambda conn: leadership.current(conn, NAME))
    assert (now.holder, now.epoch) == ("other", first + 1)
    wait_until(lambda: len(written_by(maria_db, "other")) > 3, what="the new leader goes on")
