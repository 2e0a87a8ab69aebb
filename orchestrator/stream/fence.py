"""The fence before what a leader writes to Redis: the script that writes compares epochs first."""

from __future__ import annotations

from typing import Any

import redis

from orchestrator.errors import StaleEpoch

# KEYS: stream, epoch key. ARGV: epoch, … An epoch nobody of ours can have written counts as none. A full server takes
# no new epoch, but must take what follows where that needs no memory: acknowledging is what gives some back.
_FENCE = """
local known = redis.pcall('GET', KEYS[2])
local newest = type(known) == 'string' and string.match(known, '^%d+$') and #known <= 15 and tonumber(known) or 0
if newest > tonumber(ARGV[1]) then return redis.error_reply('STALEEPOCH ' .. known) end
if newest < tonumber(ARGV[1]) then redis.pcall('SET', KEYS[2], ARGV[1]) end
"""


class Fenced:
    """What a leader does to a stream, unless a newer one has been there: the rest of a script, from ARGV[2] on."""

    def __init__(self, client: redis.Redis, key: str, script: str) -> None:
        # The braces are a hash tag: on a cluster this key lives beside its stream.
        self._keys = [key, f"{{{key}}}:epoch"]
        self._script = client.register_script(_FENCE + script)

    def __call__(self, epoch: int, *arguments: str | int) -> Any:
        """Raises StaleEpoch; nothing is written then."""
        try:
            return self._script(keys=self._keys, args=[epoch, *arguments])
        except redis.ResponseError as error:
            if "STALEEPOCH" in str(error):
                raise StaleEpoch(epoch, newest=int(str(error).split()[-1])) from None
            raise
