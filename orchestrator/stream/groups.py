"""Consumer groups: what is done alike to every stream that has one. Callers give the library's errors our names."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from orchestrator.names import is_name

# KEYS: stream. ARGV: group, consumer. Deleting a consumer destroys its pending entries: only when it has none.
FORGET_CONSUMER = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if #pending > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
"""


def ensure(client: redis.Redis, key: str, group: str) -> None:
    """Create the group at 0: at `$` it would never see what was added before it existed."""
    try:
        client.xgroup_create(key, group, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise


def acknowledge(client: redis.Redis, key: str, group: str, entry_ids: Sequence[str | bytes]) -> None:
    """Acknowledge and delete: acknowledging alone would keep the entry for ever."""
    if not entry_ids:
        return
    with client.pipeline(transaction=True) as pipe:
        pipe.xack(key, group, *entry_ids)
        pipe.xdel(key, *entry_ids)
        pipe.execute()


def idle_consumers(client: redis.Redis, key: str, group: str, idle_ms: int) -> list[str]:
    """Consumers without pending entries that have not been heard of for `idle_ms`."""
    try:
        rows = client.xinfo_consumers(key, group)
    except redis.ResponseError as error:
        if "NOGROUP" in str(error) or "no such key" in str(error):
            return []
        raise
    idle = [text(row["name"]) for row in rows if row["pending"] == 0 and row["idle"] >= idle_ms]
    return [consumer for consumer in idle if is_name(consumer)]  # no worker of ours is called otherwise


def text(value: bytes | str) -> str:
    """Whoever wrote it: what is no text equals none of ours."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
