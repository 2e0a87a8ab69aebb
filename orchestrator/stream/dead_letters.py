"""The dead-letter stream: what was given up, for whoever watches. The rows say the same, and keep it longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import redis

from orchestrator.dead_letters import DeadLetter
from orchestrator.settings import Settings
from orchestrator.stream.client import named_errors
from orchestrator.stream.fence import Fenced

#: Letters kept in the stream; the rows keep them all.
LENGTH = 100_000

# KEYS: stream. ARGV: epoch, most entries, words of a letter, then of each letter: names and values of its fields.
_TELL = """
local ids = {}
local words = tonumber(ARGV[3])
for i = 4, #ARGV, words do
  ids[#ids + 1] = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', unpack(ARGV, i, i + words - 1))
end
return ids
"""


class DeadLetterStream:
    """Thread-safe. Raises RedisUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}dlq"
        self._tell = Fenced(client, self._key, _TELL)

    def tell(self, letters: Sequence[DeadLetter]) -> None:
        """Tell of what is no job of ours; whoever met it may."""
        if letters:
            with named_errors(self._settings, self._client), self._client.pipeline(transaction=False) as pipe:
                for letter in letters:
                    pipe.xadd(self._key, _fields(letter), maxlen=LENGTH, approximate=True)  # type: ignore[arg-type]  # redis wants an invariant dict
                pipe.execute()

    def tell_as_leader(self, epoch: int, letters: Sequence[DeadLetter]) -> list[str]:
        """Tell of jobs that were given up; the id of each letter's entry. Raises StaleEpoch.

        The entries of a leader that was replaced would stay: its successor tells the same, and remembers its own.
        """
        if not letters:
            return []
        with named_errors(self._settings, self._client):
            told = [word for letter in letters for field in _fields(letter).items() for word in field]
            words = len(told) // len(letters)
            return [entry_id.decode() for entry_id in self._tell(epoch, LENGTH, words, *told)]

    def take_back(self, entry_ids: Sequence[str]) -> None:
        """Letters whose jobs live again or are forgotten.

        The API does that too, so no epoch is asked for: the row said which entry was its own, and no other will ever
        have that id. Late or twice, it is as right as at once.
        """
        if entry_ids:
            with named_errors(self._settings, self._client):
                self._client.xdel(self._key, *entry_ids)


def _fields(letter: DeadLetter) -> dict[str, str | int]:
    return asdict(letter) | {"last_error": letter.last_error[:1000]}
