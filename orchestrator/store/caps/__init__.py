"""Caps: how many jobs that share a key run at once, across the cluster.

A job that is claimed takes a seat at each of its capped keys, all or none, and remembers them (`held_caps`); whoever
ends its attempt gives them back in the same transaction. A job that finds no seat is parked (`store.blocked`) under the
row's lock, and whoever gives a seat back lets the next one go: no wakeup is lost, and nobody reads past those who wait.

The rows of the keys are locked before those of any job: a worker ends and claims in one transaction, and would else
lock keys, then jobs, then keys again. A job's keys never change, so they are known before its row is locked. Who cannot
know them beforehand (the leader, for the dead) locks them last, and is run again if that was a deadlock.

A key without a row has nobody seated. A key with no seats at all, as a pause makes it, needs none.

`seats` is a transaction that claims or ends, `glance` a publisher's look, `admit` a submit's, `care` the leader's. They
stand on `keys` (which caps limit a job), `room` (who still fits), `rows` (the keys' rows), `held` (what the jobs' rows
say) and `waiting` (parking, and letting go).
"""

from orchestrator.store.caps.admit import admit
from orchestrator.store.caps.care import CONCERNED, Round, forget, heal, let_go, seat_late
from orchestrator.store.caps.glance import Glance
from orchestrator.store.caps.held import remember
from orchestrator.store.caps.keys import NO_BOOK, caps_of
from orchestrator.store.caps.room import Room
from orchestrator.store.caps.seats import Seats
from orchestrator.store.caps.waiting import look

__all__ = [
    "CONCERNED",
    "NO_BOOK",
    "Glance",
    "Room",
    "Round",
    "Seats",
    "admit",
    "caps_of",
    "forget",
    "heal",
    "let_go",
    "look",
    "remember",
    "seat_late",
]
