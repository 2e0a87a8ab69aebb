"""A lane: one stream, one consumer group, and everything that is done to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import redis

from orchestrator.batching import Seats
from orchestrator.jobs import DEFAULT_LANE, Ready
from orchestrator.names import is_name
from orchestrator.settings import Settings
from orchestrator.stream import groups
from orchestrator.stream.client import named_errors
from orchestrator.stream.ear import Ear
from orchestrator.stream.fence import Fenced
from orchestrator.stream.groups import text

log = logging.getLogger(__name__)

T = TypeVar("T")

#: What Redis says about a key that is no stream, and about one whose last id is the last there can be.
_BEYOND_USE = ("WRONGTYPE", "exhausted the last possible ID")

#: Entries that one read for batches brings at most: they are claimed by one transaction.
MAX_READ = 1000

#: Name under which the leader holds entries while it decides what becomes of them.
LEADER = "leader"

# KEYS: stream. ARGV: job_id, type, trace for each job. One command instead of hundreds, and all entries or none.
_ANNOUNCE = """
for i = 1, #ARGV, 3 do
  if ARGV[i + 2] == '' then
    redis.call('XADD', KEYS[1], '*', 'job_id', ARGV[i], 'type', ARGV[i + 1])
  else
    redis.call('XADD', KEYS[1], '*', 'job_id', ARGV[i], 'type', ARGV[i + 1], 'trace', ARGV[i + 2])
  end
end
"""

# KEYS: stream, key under which to keep what is no stream. Looks again first: another may have mended it meanwhile.
_START_OVER = """
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'stream' then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' and info[i + 1] == '18446744073709551615-18446744073709551615' then
      redis.call('DEL', KEYS[1])
    end
  end
elseif kind ~= 'none' then
  redis.call('RENAME', KEYS[1], KEYS[2])
end
return kind
"""

# KEYS: stream. ARGV: epoch, group, entry ids…
_ACKNOWLEDGE = """
for i = 3, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[2], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
"""

# KEYS: stream. ARGV: epoch, group, consumer, idle milliseconds, cursor, most entries.
_TAKE_IDLE = "return redis.call('XAUTOCLAIM', KEYS[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], 'COUNT', ARGV[6])"

# KEYS: stream, epoch key. Both go: whoever led before this epoch finds nothing there to write to.
_DROP = "redis.call('DEL', KEYS[1], KEYS[2])"

# KEYS: stream. ARGV: group, consumer, free slots, then for each batching type: its name, how many jobs make a full
# batch, how many more the batch begun by earlier reads can take. Delivers entries from the first on, while they can
# run now: beside others of their type, or in a free slot. The first that cannot, and all behind it, stay for whoever
# is free: reading them to see what they are would take them from others.
_READ_FITTING = """
local after
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
for _, group in ipairs(groups) do
  local about = {}
  for i = 1, #group, 2 do about[group[i]] = group[i + 1] end
  if about['name'] == ARGV[1] then after = about['last-delivered-id'] end
end
if not after then return redis.error_reply('NOGROUP of this name') end
local slots, size, places, most = tonumber(ARGV[3]), {}, {}, tonumber(ARGV[3])
for i = 4, #ARGV, 3 do
  size[ARGV[i]], places[ARGV[i]] = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  most = most + places[ARGV[i]] + slots * size[ARGV[i]]
end
local fitting, blocked = 0, 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', math.max(1, math.min(most, MOST)))) do
  local kind = ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'type' then kind = entry[2][i + 1] end
  end
  if (places[kind] or 0) > 0 then
    places[kind] = places[kind] - 1
  elseif slots > 0 then
    slots = slots - 1
    if size[kind] then places[kind] = size[kind] - 1 end
  else
    blocked = 1
    break
  end
  fitting = fitting + 1
end
if fitting == 0 then return {blocked, {}} end
return {blocked, redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', fitting, 'STREAMS', KEYS[1], '>')}
""".replace("MOST", str(MAX_READ))


class Entry(NamedTuple):
    """One delivery. `job_id` is None when the entry names no job: nothing of ours writes such entries."""

    entry_id: str
    job_id: str | None
    #: What it says the job's type is; the row decides.
    type: str = ""


@dataclass(frozen=True)
class Idle:
    """One step of the walk over idle entries."""

    cursor: str
    entries: tuple[Entry, ...]
    deleted: tuple[str, ...]


class Survey(NamedTuple):
    """Jobs with an entry that somebody has or will get, and entries that nobody has and nobody will get.

    The latter: the group was set past them, or their consumer was deleted.
    """

    coming: set[str]
    skipped: list[str]


class Lane:
    """Operations on one lane. Raises RedisUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis, settings: Settings, name: str) -> None:
        suffix = "" if name == DEFAULT_LANE else f":{name}"
        self.name = name
        self.key = f"{settings.stream_prefix}inference_jobs{suffix}"
        self.group = f"cg:inference{suffix}"
        self._client = client
        self._settings = settings
        self._announce = client.register_script(_ANNOUNCE)
        self._start_over = client.register_script(_START_OVER)
        self._acknowledge = Fenced(client, self.key, _ACKNOWLEDGE)
        self._take_idle = Fenced(client, self.key, _TAKE_IDLE)
        self._drop = Fenced(client, self.key, _DROP)
        self._forget = client.register_script(groups.FORGET_CONSUMER)

    def ensure_group(self) -> None:
        with named_errors(self._settings, self._client):
            groups.ensure(self._client, self.key, self.group)

    def announce(self, jobs: Sequence[Ready]) -> None:
        """Add an entry for each job. It names the job; what to do stands in the row."""
        fields = [field for job in jobs for field in (job.job_id, job.type, job.trace_context or "")]
        self._mended(lambda: self._announce(keys=[self.key], args=fields))

    def length(self) -> int:
        """Entries that are announced or being worked on."""
        return self._mended(lambda: int(self._client.xlen(self.key)))

    def unread(self) -> int:
        """Entries that nobody has read yet."""
        return self._mended(self._unread)

    def _unread(self) -> int:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.xlen(self.key)
            pipe.xpending(self.key, self.group)
            length, pending = pipe.execute(raise_on_error=False)
            if isinstance(length, redis.RedisError):
                raise length
            # Without a group nothing has been read.
            return int(length) - (0 if isinstance(pending, redis.ResponseError) else int(pending["pending"]))

    def survey(self, limit: int) -> Survey:
        """What became of the oldest entries."""
        return self._mended(lambda: self._survey(limit))

    def _survey(self, limit: int) -> Survey:
        with self._client.pipeline(transaction=True) as pipe:
            pipe.xrange(self.key, count=limit)
            pipe.xinfo_groups(self.key)
            pipe.xpending_range(self.key, self.group, min="-", max="+", count=limit)
            rows, groups, pending = pipe.execute(raise_on_error=False)
            if isinstance(rows, redis.RedisError):
                raise rows
        entries = _entries(rows)
        if isinstance(groups, redis.ResponseError) or isinstance(pending, redis.ResponseError):
            skipped = set()  # no stream or no group: it is created at 0, before all of them
        else:
            held = {text(row["message_id"]) for row in pending}
            passed = max(_order(row["last-delivered-id"]) for row in groups if text(row["name"]) == self.group)
            skipped = {e.entry_id for e in entries if _order(e.entry_id) <= passed and e.entry_id not in held}
        coming = {entry.job_id for entry in entries if entry.job_id and entry.entry_id not in skipped}
        return Survey(coming, sorted(skipped))

    def ack(self, entry_ids: Sequence[str]) -> None:
        with named_errors(self._settings, self._client):
            groups.acknowledge(self._client, self.key, self.group, entry_ids)

    def ack_as_leader(self, epoch: int, entry_ids: Sequence[str]) -> None:
        """The same on behalf of dead workers. Raises StaleEpoch when a newer leader has been here."""
        if entry_ids:
            with named_errors(self._settings, self._client):
                self._acknowledge(epoch, self.group, *entry_ids)

    def take_idle(self, epoch: int, cursor: str, idle_ms: int, count: int) -> Idle:
        """Take over entries nobody touched for `idle_ms`, from `cursor` on; the walk ends at cursor 0-0.

        Raises StaleEpoch: a leader that was replaced would keep them from its successor for as long again.
        """
        return self._mended(lambda: self._taken(epoch, cursor, idle_ms, count))

    def _taken(self, epoch: int, cursor: str, idle_ms: int, count: int) -> Idle:
        try:
            following, rows, deleted = self._take_idle(epoch, self.group, LEADER, idle_ms, cursor, count)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return Idle("0-0", (), ())
        return Idle(text(following), tuple(_scripted(rows)), tuple(text(entry_id) for entry_id in deleted))

    def drop(self, epoch: int) -> None:
        """Delete what is left of a lane that nobody uses. Raises StaleEpoch."""
        with named_errors(self._settings, self._client):
            self._drop(epoch)

    def idle_consumers(self, idle_ms: int) -> list[str]:
        """Consumers without pending entries that have not been heard of for `idle_ms`."""
        with named_errors(self._settings, self._client):
            return groups.idle_consumers(self._client, self.key, self.group, idle_ms)

    def forget_consumer(self, consumer: str) -> bool:
        """Remove a consumer, unless entries are pending for it.

        Workers do it for themselves, so no epoch is asked for: who is removed by mistake is a consumer again with its
        next read, and has lost nothing.
        """
        with named_errors(self._settings, self._client):
            return bool(self._forget(keys=[self.key], args=[self.group, consumer]))

    def _mended(self, work: Callable[[], T]) -> T:
        """Do it; when the key can serve no more, whoever did that to it, start the lane over and do it once more.

        What waited in it is announced again by `repair`, as after a FLUSHALL.
        """
        with named_errors(self._settings, self._client):
            try:
                return work()
            except redis.ResponseError as error:
                if not any(sign in str(error) for sign in _BEYOND_USE):
                    raise
                aside = f"{{{self.key}}}:aside:{time.time_ns()}"
                kind = text(self._start_over(keys=[self.key, aside]))
                log.warning("lane started over", extra={"pool_id": self.name, "was": kind, "error": str(error)})
                return work()


class LaneReader:
    """The reading side of one worker, on a connection of its own: a blocked read would hold up everyone else."""

    def __init__(self, ear: Ear, settings: Settings, lane: Lane, consumer: str) -> None:
        self.ear = ear
        self._client = ear.client
        self._settings = settings
        self._lane = lane
        self._consumer = consumer
        # After a broken connection an answer may have been lost on the way: its entries are ours, and pending.
        self._look_back = True
        self._grouped = False
        self._fitting = ear.client.register_script(_READ_FITTING)

    def look_back(self) -> None:
        """The next read begins with what was delivered to this consumer and not acknowledged."""
        self._look_back = True

    def read(self, count: int, block_ms: int) -> list[Entry]:
        """Up to `count` entries; waits at most `block_ms` for the first. Entries may come twice after a fault."""
        with self._looking_back_after_errors():
            return self._read(lambda: self._xreadgroup(">", count, block_ms))

    def read_fitting(self, seats: Seats) -> list[Entry]:
        """As many entries as can run now, without waiting; the first that cannot stays, and all behind it."""
        with self._looking_back_after_errors():
            return self._read(lambda: self._read_fitting(seats))

    def wait_for_more(self, block_ms: int) -> None:
        """Return when an entry is added, or after `block_ms`. Nobody gets it by that: it may not be one that fits.

        It may also return before: a read never waits longer than the connection does for an answer.
        """
        wait_ms = max(min(block_ms, self._settings.redis_block_ms), 1)
        with self._looking_back_after_errors():
            self._client.xread({self._lane.key: "$"}, count=1, block=wait_ms)

    @contextmanager
    def _looking_back_after_errors(self) -> Iterator[None]:
        try:
            with named_errors(self._settings, self._client):
                yield
        except Exception:
            self._look_back = True
            self._grouped = False
            raise

    def _read(self, read: Callable[[], list[Entry]]) -> list[Entry]:
        if not self._grouped:
            self._lane.ensure_group()
            self._grouped = True
        try:
            if self._look_back:
                pending = self._xreadgroup("0", count=10_000, block_ms=None)
                self._look_back = False
                if pending:
                    return pending
            return read()
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._lane.ensure_group()  # flushed, deleted or destroyed: start over from what is there
            return []

    def _read_fitting(self, seats: Seats) -> list[Entry]:
        begun = [field for type, size in seats.sizes.items() for field in (type, size, seats.places.get(type, 0))]
        arguments = [self._lane.group, self._consumer, seats.slots, *begun]
        blocked, answer = self._fitting(keys=[self._lane.key], args=arguments)
        found = [entry for _key, rows in answer for entry in _scripted(rows)]
        seats.blocked = bool(blocked) or len(found) >= MAX_READ
        return found

    def _xreadgroup(self, start: str, count: int, block_ms: int | None) -> list[Entry]:
        answer: Any = self._client.xreadgroup(
            self._lane.group, self._consumer, {self._lane.key: start}, count=count, block=block_ms
        )
        return [entry for _key, rows in answer for entry in _entries(rows)]


def _entries(rows: Iterable[tuple[Any, Any]]) -> list[Entry]:
    return [Entry(text(entry_id), _job_id(fields), _type(fields)) for entry_id, fields in rows]


def _scripted(rows: Iterable[tuple[Any, Any]]) -> list[Entry]:
    """Those of a script's answer, which the client does not parse."""
    return _entries((entry_id, dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in rows)


def _type(fields: dict[bytes, bytes] | None) -> str:
    return (fields or {}).get(b"type", b"").decode(errors="replace")


def _job_id(fields: dict[bytes, bytes] | None) -> str | None:
    """The job an entry names; None for anything that cannot be the id of a job, whoever wrote it."""
    named = (fields or {}).get(b"job_id", b"").decode(errors="replace")
    return named if is_name(named) else None


def _order(entry_id: bytes | str) -> tuple[int, int]:
    moment, _, place = text(entry_id).partition("-")
    return int(moment), int(place)
