"""How far ahead a lane is announced. Entries in a stream cannot change places any more; rows can."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of a lane's consumption that are announced ahead.
WINDOW_S = 0.25
#: Seconds that a job with a deadline is announced before the last moment, beside what the window takes to drain;
#: and how long that is at most believed to take.
MARGIN_S, LONGEST_DRAIN_S = 5.0, 3600.0


@dataclass
class Pace:
    """How fast a lane moves, as one publisher sees it. Times are monotonic and given by the caller."""

    #: Live slots; None: its pool takes no jobs.
    slots: int | None = 0
    #: Jobs that this process can take at once, where slots take several each.
    reach: int = 0
    #: A moving average of what is announced per second.
    per_second: float = 0.0
    #: Seconds between two jobs that leave a window which is not empty; 0 while nobody knows.
    between_s: float = 0.0
    #: What the window was at the last look, and how many entries should be left of it now.
    window: int = 0
    left: int = 0
    #: How many more jobs were announced for their deadline than for their rank, lately.
    ahead: int = 0
    #: When slots were counted, and urgent jobs looked for.
    slots_counted_at: float = float("-inf")
    urgent_sought_at: float = float("-inf")
    _counted: int = 0
    _since: float | None = None
    #: Entries that stood there at a moment, to learn from how many there are later.
    _stood: int = 0
    _stood_at: float = 0.0

    def room(self, unread: int, least: int, most: int, now: float) -> int:
        """How many entries to add, none before half of the window is free: one transaction for many jobs.

        Twice the live slots, or what full batches take, plus what the lane consumes in a moment. So a slow lane keeps
        its order changeable nearly to the last, and a fast one is refilled by the hundred.
        """
        self._watch(unread, now)
        if self.slots is None:
            self.window = 0  # its pool is drained: what waits stays where it can still be moved
            return 0
        wanted = max(2 * self.slots, self.reach) + round(self.per_second * WINDOW_S)
        self.window = max(least, min(wanted, most))
        self.left = unread
        room = self.window - unread
        return room if room >= (self.window + 1) // 2 else 0

    def filled(self, announced: int, urgent: int, now: float) -> None:
        """`urgent` of them went in for their deadline."""
        self.left += announced
        self._stood += announced
        self.ahead = max(0, self.ahead + 2 * urgent - announced)
        self._counted += announced
        self._since = now if self._since is None else self._since
        if now - self._since >= WINDOW_S:
            self.per_second += (self._counted / (now - self._since) - self.per_second) / 2
            self._since, self._counted = now, 0

    @property
    def horizon_s(self) -> float:
        """How long before its latest start a job must be announced to start in time."""
        return min(self.window * self.between_s, LONGEST_DRAIN_S) + MARGIN_S

    def _watch(self, unread: int, now: float) -> None:
        """Learn how long a job takes to leave; of a window that ran dry, only that it was no longer than this."""
        taken = self._stood - unread
        if taken > 0:
            each = (now - self._stood_at) / taken
            if unread == 0:
                self.between_s = min(each, self.between_s or each)
            else:
                self.between_s += (each - self.between_s) / 2 if self.between_s else each
        if taken or not unread:
            self._stood, self._stood_at = unread, now
