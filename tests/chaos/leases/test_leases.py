"""The short run of `make test`, and the checker itself: a sound history passes, every way to break it is found."""

import time
from pathlib import Path

import pytest

from tests.chaos.leases.cards import GATE_PCT, MEGABYTES, Node, SoleDriver
from tests.chaos.leases.checker import check
from tests.chaos.leases.history import Beat, Grant, History, Outage, Quarantine
from tests.chaos.leases.run import Plan, run

CARD, OTHER = "GPU-00", "GPU-01"
USABLE_MB = MEGABYTES * GATE_PCT // 100
STALE_S = 2.0


@pytest.mark.timeout(300)
def test_no_card_is_given_twice_and_everything_comes_back(tmp_path):
    report = run(Plan(seed=1, operations=1500, clients=32, calm_s=2.0), folder=tmp_path)
    assert not report.violations, "\n".join(map(str, report.violations[:20]))
    assert report.figures["granted"] > 100
    assert report.figures["strangers"] > 5


# ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def node(tmp_path: Path) -> Node:
    driver = SoleDriver(tmp_path / "cards", tmp_path / "libnvidia-ml.so.1")
    return Node("node-0", driver, [CARD, OTHER], History(), STALE_S)


def grant(memory_mb: int, asked: float | None = None, token: str = "", uuids: tuple[str, ...] = (CARD,)) -> Grant:
    asked = time.monotonic() if asked is None else asked
    return Grant(token or f"token-{memory_mb}-{asked}", 0, uuids, memory_mb, 4.0, asked, asked)


def incidents(node: Node) -> list[str]:
    return [found.invariant for found in node._history.incidents]


def test_leases_may_fill_what_is_usable_and_not_a_megabyte_more(node):
    node.granted(grant(USABLE_MB - 1000, token="a"), visible=True)
    node.granted(grant(1000, token="b"), visible=True)
    assert incidents(node) == []
    node.granted(grant(1, token="c"), visible=True)
    assert incidents(node) == ["INV-12"]


def test_a_lease_counts_for_as_long_as_it_was_certainly_renewed(node, monkeypatch):
    first = grant(USABLE_MB, asked=100.0, token="a")
    monkeypatch.setattr(time, "monotonic", lambda: 103.0)
    node.granted(first, visible=True)
    node.renewed(first, 103.0)
    monkeypatch.setattr(time, "monotonic", lambda: 107.5)
    node.granted(grant(1, asked=107.5, token="b"), visible=True)
    assert incidents(node) == []  # nobody renewed it: it may be over, its holder may not know it yet
    node.renewed(first, 106.0)
    node.granted(grant(1, asked=107.5, token="c"), visible=True)
    assert incidents(node) == ["INV-12"]


def test_strangers_count_when_every_sample_has_seen_them(node):
    stranger = node.intrude(CARD, 1, 0.5)
    assert stranger is not None
    node.granted(grant(USABLE_MB, token="a"), visible=True)
    assert incidents(node) == []  # it came just now: no sample may know of it
    node.granted(grant(1, asked=stranger.since + STALE_S + 0.1, token="b", uuids=(CARD,)), visible=True)
    assert incidents(node) == ["INV-12"]


def test_memory_in_use_counts_after_the_end_of_its_lease(node):
    late = grant(USABLE_MB - 1000, token="late")
    node.granted(late, visible=True)
    assert node.allocate(late, 1, USABLE_MB - 1000)
    node.uncertain(late)
    following = grant(2000, token="following")
    node.granted(following, visible=True)
    assert incidents(node) == []  # the lease may have ended in time
    assert node.allocate(following, 2, 2000)
    assert incidents(node) == ["INV-12"]  # but its memory is there


def test_what_a_nameless_lease_may_hide_is_not_asked_for(node):
    stranger = node.intrude(CARD, 1, 0.5)
    assert stranger is not None
    asked = stranger.since + STALE_S + 0.1
    hidden = grant(stranger.memory_mb, asked, "hidden")
    node.granted(hidden, visible=False)
    node.granted(grant(USABLE_MB - stranger.memory_mb, asked, "more"), visible=True)
    assert incidents(node) == []


def test_a_card_gives_no_more_than_it_has_and_nothing_to_leases_from_before_its_loss(node):
    held = grant(4000)
    node.granted(held, visible=True)
    assert node.allocate(held, 1, 4000)
    node.intrude(CARD, 2, 1.0)
    assert not node.allocate(grant(1000), 3, 1000)
    node.lose(CARD)
    assert node.cards[CARD].used_mb == 0
    node.find(CARD)
    assert not node.allocate(held, 1, 4000)
    assert node.allocate(grant(4000), 1, 4000)


def test_a_lease_that_lost_one_of_its_cards_is_over_on_the_others_too(node):
    pair, late = (grant(USABLE_MB, token=token, uuids=(CARD, OTHER)) for token in ("pair", "late"))
    node.granted(pair, visible=True)
    node.lose(CARD)
    node.granted(late, visible=True)  # its answer was under way
    node.granted(grant(USABLE_MB, token="next", uuids=(OTHER,)), visible=True)
    assert incidents(node) == []


def test_the_driver_tells_what_each_process_uses_of_each_card(node):
    pair = grant(3000, token="pair", uuids=(CARD, OTHER))
    assert node.allocate(pair, 7, 3000) and node.allocate(grant(1000, token="one"), 7, 500)
    assert (node.driver.used_mb(CARD), node.driver.used_mb(OTHER)) == (3500, 3000)
    node.free(pair)
    assert (node.driver.used_mb(CARD), node.driver.used_mb(OTHER)) == (500, 0)
    node.died(7)
    assert node.driver.used_mb(CARD) == 0


# ── the checker ─────────────────────────────────────────────────────────────────────────────────────────────────


def lost(**given: float | None) -> Outage:
    times: dict[str, float | None] = {"began": 10.0, "seen": 11.0, "revoked": 12.0, "mended": 15.0}
    return Outage("lost", (CARD,), **(times | given))  # type: ignore[arg-type]


WHY = f"this lease is expired (GPU {CARD} was lost: it fell off the bus)"
BEFORE, DURING, AFTER = grant(1, 5.0, "before"), grant(1, 13.0, "during"), grant(1, 16.0, "after")


def beat(of: Grant, sent: float, status: int = 200, *, took_s: float = 0.1, in_time: bool = True) -> Beat:
    return Beat(of, sent, sent + took_s, status, in_time, WHY if status == 410 else "")


def sound() -> History:
    """A lease that was renewed, then revoked, since its card was lost; the next one came after that."""
    beats = [beat(BEFORE, 6.0), beat(BEFORE, 13.0, 410), beat(AFTER, 17.0)]
    quarantine = Quarantine(OTHER, f"memory of lease {BEFORE.name} did not come back: held by process 7", 20.0)
    return History([BEFORE, AFTER], beats, [lost()], [quarantine], kept={BEFORE.name})


def test_a_sound_history_passes():
    assert check(sound()) == []


def broken_histories():
    yield "INV-15", lambda h: h.grants.append(DURING)
    yield "INV-15", lambda h: h.outages.append(Outage("ecc", (OTHER,), 1.0, None, None, 3.0))
    yield "F-39", lambda h: h.outages.append(lost(revoked=None))
    yield "F-39", lambda h: h.beats.insert(1, beat(BEFORE, 11.5))
    yield "F-39", lambda h: h.beats.append(beat(grant(1, 10.5, "meanwhile"), 12.5))
    yield "INV-14", lambda h: h.beats.append(beat(BEFORE, 14.0))
    yield "INV-14", lambda h: h.beats.append(beat(AFTER, 18.0, 404))
    yield "INV-17", lambda h: h.beats.append(beat(grant(1, 5.0, "x", (OTHER,)), 18.0, 410))
    yield "INV-17", lambda h: h.beats.append(beat(AFTER, 18.0, 410))
    yield "INV-17", lambda h: h.beats.append(beat(grant(1, 8.0, "early"), 9.5, 410, took_s=0.4))
    yield "INV-17", lambda h: h.beats.append(beat(grant(1, 8.0, "y"), 12.5, 410)._replace(why="this lease is expired"))
    yield "INV-16", lambda h: h.kept.clear()
    yield "INV-16", lambda h: h.quarantines.append(Quarantine(OTHER, "lease x: nobody can tell", 14.0))
    yield "INV-12", lambda h: h.incident("INV-12", "seen")


@pytest.mark.parametrize(("invariant", "breaks"), list(broken_histories()))
def test_what_is_broken_is_found(invariant, breaks):
    history = sound()
    breaks(history)
    assert invariant in {violation.invariant for violation in check(history)}


@pytest.mark.parametrize(
    "event",
    [
        beat(BEFORE, 13.0, 410, in_time=False),  # it was not renewed in time
        beat(grant(1, 10.5, "soon"), 13.5, 410),  # its card was lost before anybody knew
        beat(grant(1, 8.0, "slow"), 9.0, 410, took_s=2.5),  # its card was lost while the question was on its way
        beat(grant(1, 10.5, "soon"), 11.5),  # the next sample revokes it
    ],
)
def test_leases_may_end_for_a_reason(event):
    history = sound()
    history.beats.append(event)
    assert check(history) == []
