"""Jobs claimed ahead: when, how many, which slot gets which, and what becomes of those that find none."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.leases import ResidentSlot
from orchestrator.store.claim import Claim
from tests.waiting import wait_until
from worker.hand import AHEAD, BRIEF_S, IN_A_ROW, PATIENCE_S, SMALL, Hand, is_plain
from worker.handlers import Batching
from worker.roster import Roster


def job(job_id: str, *, lease: Any = None, payload: str = "{}", batch: str = "") -> tuple[Claim, ...]:
    return (Claim(job_id, 1, "echo", payload, "a", None, None, None, lease, batch),)


GPU: Any = SimpleNamespace(resident=None, gpus=("gpu-1",))
WARM: Any = SimpleNamespace(resident="lease-1", gpus=("gpu-1",))
CPU: Any = SimpleNamespace(resident=None, gpus=())
BLANK: Any = SimpleNamespace(resident=None)
KEEPS: Any = SimpleNamespace(resident=ResidentSlot("lease-1", "echo", None, 100, ()))


@pytest.fixture
def hand() -> Hand:
    return Hand()


def names(batches: list[tuple[Claim, ...]]) -> list[str]:
    return [batch[0].job_id for batch in batches]


def open_up(hand: Hand) -> None:
    for _ in range(IN_A_ROW):
        hand.saw(BRIEF_S / 2)


def test_it_opens_after_so_many_brief_jobs_in_a_row_and_closes_with_the_first_other(hand):
    for _ in range(IN_A_ROW):
        assert not hand.open
        hand.saw(BRIEF_S / 2)
    assert hand.open
    hand.saw_other()
    assert not hand.open


def test_jobs_that_usually_take_longer_do_not_open_it(hand):
    for _ in range(3 * IN_A_ROW):
        hand.saw(BRIEF_S * 2)
    assert not hand.open and not hand.brief


def test_a_brief_job_that_had_to_wait_for_a_processor_does_not_close_it(hand):
    """On a busy machine hardly so many would follow each other without one that waits."""
    open_up(hand)
    hand.saw(BRIEF_S * 5)
    assert hand.open


def test_one_that_took_much_longer_closes_it_for_a_few(hand):
    open_up(hand)
    hand.saw(BRIEF_S * 100)
    assert not hand.open
    open_up(hand)
    assert hand.open


def test_a_slot_gets_the_oldest_that_it_may_run(hand):
    for batch in (job("leased", lease=GPU), job("on-cpu", lease=CPU), job("plain")):
        assert hand.keep(batch, 0.0)
    assert names([hand.next_for(KEEPS)]) == ["on-cpu"]
    assert names([hand.next_for(BLANK)]) == ["leased"]
    assert names([hand.next_for(KEEPS)]) == ["plain"]
    assert hand.next_for(BLANK) is None and not hand


@pytest.mark.parametrize("batch", [job("warm", lease=WARM), job("large", payload="x" * (SMALL + 1))])
def test_who_needs_a_certain_slot_or_a_long_time_to_be_sent_cannot_wait(hand, batch):
    assert not hand.keep(batch, 0.0) and not hand


def test_only_small_jobs_without_a_lease_lead_to_more_like_them():
    assert is_plain(job("plain"))
    for other in (job("leased", lease=CPU), job("large", payload="x" * (SMALL + 1)), job("batched", batch="b")):
        assert not is_plain(other)


def test_who_waited_too_long_leaves_and_nothing_more_is_claimed_ahead(hand):
    hand.keep(job("old"), 0.0)
    hand.keep(job("young"), 1.0)
    open_up(hand)
    assert hand.overdue(PATIENCE_S) == [] and hand.open
    assert names(hand.overdue(PATIENCE_S + 0.5)) == ["old"]
    assert len(hand) == 1 and not hand.open


def test_who_is_given_up_leaves_next(hand):
    for name in ("one", "two", "three"):
        hand.keep(job(name), 0.0)
    hand.give_up(("two", 2))
    assert hand.overdue(0.0) == [], "of another attempt"
    hand.give_up(("two", 1))
    assert names([hand.next_for(BLANK), hand.next_for(BLANK)]) == ["one", "three"]
    assert hand.next_for(BLANK) is None and len(hand) == 1
    assert names(hand.overdue(0.0)) == ["two"]
    for name in ("four", "five"):
        hand.keep(job(name), 0.0)
    hand.give_up()
    assert names(hand.overdue(0.0)) == ["four", "five"]


class Slot(SimpleNamespace):
    """A slot that remembers what it was sent."""

    dying = leaving = worn = False

    def __init__(self, **more: Any) -> None:
        super().__init__(**({"resident": None, "slow": False, "sent": [], "run": None, "occupied": False} | more))

    def take(self, batch: Any) -> None:
        self.occupied = True

    def runs(self, _job_id: str, _attempt: int) -> bool:
        return False

    def send_jobs(self, batch: Any) -> None:
        self.sent.append(batch[0].job_id)


@pytest.fixture
def roster() -> Any:
    made: Any = Roster(2, 1.0)
    made._slots = [Slot(), Slot()]
    made._free = list(made._slots)
    return made


def open_hand(roster: Any) -> None:
    open_up(roster._hand)


def test_there_is_room_for_as_many_as_slots_are_free_until_jobs_are_known_to_be_brief(roster):
    assert roster.wait_room(0.0) == 2
    roster.dispatch(job("a"))
    assert roster.wait_room(0.0) == 1
    open_hand(roster)
    assert roster.wait_room(0.0) == 2 * AHEAD


def test_ahead_there_is_room_again_while_each_slot_has_one_job_left(roster):
    """The next claim takes about as long as those do: with an empty hand slots would wait for it."""
    open_hand(roster)
    first, second = roster._slots
    for name in "abcde":
        assert roster.dispatch(job(name))
    assert len(roster._hand) == 3 and roster.wait_room(0.0) == 0
    roster._release(first)
    assert len(roster._hand) == 2 and roster.wait_room(0.0) == 2 * AHEAD
    for slot in (second, first):
        roster._release(slot)
    assert roster.wait_room(0.0) == 2 * AHEAD
    assert sorted(first.sent + second.sent) == ["a", "b", "c", "d", "e"] and not roster._free


def test_whoever_waits_for_room_is_woken_when_the_hand_runs_low(roster):
    open_hand(roster)
    for name in "abcde":
        roster.dispatch(job(name))
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(roster.wait_room(60.0)), name="waits-for-room", daemon=True)
    waiting.start()
    wait_until(lambda: roster._changed._waiters, what="somebody waits")
    roster._release(roster._slots[0])
    waiting.join(10)
    assert found == [2 * AHEAD]


def test_slots_with_longer_jobs_are_not_counted(roster):
    open_hand(roster)
    roster._slots[0].slow = True
    assert roster.wait_room(0.0) == AHEAD


def test_workers_with_batches_claim_nothing_ahead(roster):
    open_hand(roster)
    roster.batching = Batching({"many": 4}, {})
    assert roster.wait_room(0.0) == 2


def test_a_leased_job_ends_it_and_gets_the_next_blank_slot(roster):
    open_hand(roster)
    assert roster.vacancies() == ([], 2)
    roster.dispatch(job("a"))
    roster.dispatch(job("b"))
    assert roster.vacancies() == ([], 2), "both are free in a moment"
    assert roster.dispatch(job("leased", lease=GPU))
    assert roster.wait_room(0.0) == 0 and roster.vacancies() == ([], 0)
    roster._release(roster._slots[0])
    assert roster._slots[0].sent[-1] == "leased"


def test_what_waits_in_hand_counts_as_running_until_it_is_put_back(roster):
    open_hand(roster)
    for name in "abc":
        roster.dispatch(job(name))
    for slot in roster._slots:
        slot.occupied = False
    assert not roster.wait_idle(0.0)
    roster.cancel("c", 1)
    assert names(roster._hand.overdue(0.0)) == ["c"]
    assert roster.wait_idle(0.0)


def test_nothing_is_kept_once_it_closes(roster):
    open_hand(roster)
    roster._closing = True
    assert not roster.dispatch(job("a"))


def test_whoever_waits_in_hand_is_first_when_nothing_more_is_claimed_ahead(roster):
    roster._free = [Slot(resident=KEEPS.resident)]
    assert roster.dispatch(job("leased", lease=GPU))
    assert roster.wait_room(0.0) == 0


def test_a_job_that_no_slot_can_take_costs_no_slot(roster, monkeypatch):
    def broken(_slot: Any, _batch: Any) -> None:
        raise TypeError("no number")

    monkeypatch.setattr(Slot, "take", broken)
    with pytest.raises(TypeError):
        roster.dispatch(job("bad"))
    assert roster.wait_room(0.0) == 2
