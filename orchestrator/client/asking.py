"""Asking for a lease until it is granted, or until the caller's patience is over."""

from __future__ import annotations

import getpass
import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.client.errors import LeaseDenied, Refused, ServerUnreachable
from orchestrator.client.paths import lease_path
from orchestrator.client.patience import AWAY_S, BUSY, RETRY_S
from orchestrator.client.steps import Operation, Pause, Request
from orchestrator.client.wire import Contact
from orchestrator.config import load
from orchestrator.errors import OrchestratorError
from orchestrator.identity import node_id
from orchestrator.names import is_name

log = logging.getLogger(__name__)

#: Holders stop this part of the time to live before the end, but at most so many seconds: memory that is given to
#: others must be out of use by then.
MARGIN, MARGIN_MAX_S = 0.2, 5.0


def this_node() -> str:
    """The name that the worker of this machine registers it under. Raises ConfigError when the settings are wrong."""
    return node_id(load().settings)


def this_user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as containers have
        name = ""
    return name if name and is_name(name) else "anonymous"


@dataclass(frozen=True)
class Wanted:
    """What is asked for; the names are those of POST /leases."""

    min_memory_mb: int
    agent: str
    ttl_seconds: float
    gpu_count: int
    cpu_fallback: bool
    node_id: str

    def body(self) -> dict[str, object]:
        """With our process id: the node's sampler knows whose memory it sees, ours and our children's."""
        return asdict(self) | {"pid": os.getpid()}


@dataclass(frozen=True)
class Grant:
    token: str = field(repr=False)
    mode: str
    node_id: str | None
    gpu_uuids: tuple[str, ...]
    gpu_indexes: tuple[int, ...]
    ttl_s: float
    #: Our monotonic time before the request was sent: the server cannot have counted from earlier.
    asked_at: float

    @property
    def margin_s(self) -> float:
        return min(MARGIN * self.ttl_s, MARGIN_MAX_S)

    @property
    def until(self) -> float:
        return self.trusted_from(self.asked_at)

    def trusted_from(self, sent_at: float) -> float:
        """How long a renewal sent then lets us use the GPU, by our own clock. The server's is not compared."""
        return sent_at + self.ttl_s - self.margin_s


@dataclass(frozen=True)
class NotNow:
    """`error` is what to raise when there is no time left to try again; what `lasts` does not pass by itself."""

    reason: str
    retry_after_s: float
    error: OrchestratorError | None = None
    lasts: bool = False


class Asking:
    """One caller's wait. `on_wait` is told each reason that differs from the last."""

    def __init__(
        self, contact: Contact, wanted: Wanted, wait_s: float | None, on_wait: Callable[[str], None] | None
    ) -> None:
        self._contact, self._wanted = contact, wanted
        self._on_wait = on_wait
        self._began = time.monotonic()
        self._deadline = float("inf") if wait_s is None else self._began + wait_s
        self._told = ""

    def wait(self) -> Operation[Grant]:
        """Raises LeaseDenied, ServerUnreachable, or Refused for a request that waiting does not mend."""
        while True:
            answer = yield from self._ask()
            if isinstance(answer, Grant):
                return answer
            left = self._deadline - time.monotonic()
            if left <= 0:
                waited_s = time.monotonic() - self._began
                raise answer.error or LeaseDenied(answer.reason, waited_s, lasts=answer.lasts)
            self._tell(answer)
            # Never earlier than told, and not all who wait at the same moment.
            yield Pause(min(left, answer.retry_after_s * random.uniform(1.0, 1.5)))

    def _ask(self) -> Operation[Grant | NotNow]:
        asked_at = time.monotonic()
        try:
            answer = yield Request("POST", "/leases", body=self._wanted.body())
        except ServerUnreachable as away:
            since = self._contact.answered_at
            if since is None or time.monotonic() - since > AWAY_S:
                raise
            return NotNow(str(away), RETRY_S, away)
        except Refused as refused:
            if refused.status not in BUSY:
                raise
            return NotNow(str(refused), refused.retry_after_s or RETRY_S, refused)
        if not answer["granted"]:
            lasts = bool(answer.get("lasts"))  # a server of an older version does not say
            return NotNow(str(answer["reason"]), float(answer["retry_after"]), lasts=lasts)
        return (yield from self._in_time(_grant(answer, self._wanted.ttl_seconds, asked_at)))

    def _in_time(self, grant: Grant) -> Operation[Grant | NotNow]:
        """A lease that is nearly over when its answer arrives is no lease."""
        if time.monotonic() < grant.until:
            return grant
        with suppress(OrchestratorError):
            yield Request("POST", lease_path(grant.token, "release"))
        return NotNow(f"the answer took as long as the lease lasts ({grant.ttl_s:g} s)", RETRY_S)

    def _tell(self, answer: NotNow) -> None:
        if answer.reason == self._told:
            return
        self._told = answer.reason
        if self._on_wait:
            self._on_wait(answer.reason)
        else:  # a warning is seen also where nobody set up logging
            log.log(logging.WARNING if answer.lasts else logging.INFO, "waiting for a GPU lease: %s", answer.reason)


def _grant(answer: dict[str, Any], ttl_s: float, asked_at: float) -> Grant:
    gpus = answer.get("gpus") or ([answer] if answer["gpu_uuid"] is not None else [])
    return Grant(
        token=answer["token"],
        mode=answer["mode"],
        node_id=answer["node_id"],
        gpu_uuids=tuple(gpu["gpu_uuid"] for gpu in gpus),
        gpu_indexes=tuple(gpu["gpu_index"] for gpu in gpus),
        ttl_s=ttl_s,
        asked_at=asked_at,
    )
