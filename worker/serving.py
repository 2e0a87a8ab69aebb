"""Served models: a command of the operator's instead of a Python handler, started once per slot and spoken to by HTTP.

    from worker import served

    served("chat", ["vllm", "serve", "{model_id}", "--host", "127.0.0.1", "--port", "{port}"],
           path="/v1/chat/completions", min_memory_mb=16000)

The command stands in the operator's module. Of a job only its `model_id` gets into it, and only as one of `models`
or as a plain name; the payload is the body of a request and nothing else. The server runs under the slot's lease, in
its process group and with its environment, and must stay in the foreground: one that daemonizes is not supported.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPException
from string import Formatter
from typing import Any, ClassVar

from worker.context import Context
from worker.handlers import Cancelled, OutOfTime, Permanent, handler
from worker.loopback import Answer, Request, ask
from worker.ports import free_port, listens
from worker.server import PortTaken, Server, ServerBusy, ServerError, ServerFailed, ServerNotReady, ServerSilent

#: What a command's arguments may name in braces.
PLACEHOLDERS = frozenset({"port", "model_id", "device"})
#: Another process may take the port before the server does: so many ports are tried.
PORT_TRIES = 3
#: Seconds between two questions whether it is healthy yet.
POLL_S = 0.1
#: Seconds in which one that is healthy says so.
HEALTH_S = 5.0
#: Seconds after a broken connection in which the end of the server that broke it shows.
EXIT_SHOWS_S = 1.0
#: Characters of a server's complaint that an error shows.
COMPLAINT = 2000
#: "Not now": Request Timeout, Too Early, Too Many Requests, Service Unavailable.
BUSY = frozenset({408, 425, 429, 503})

# A name, no option, no path that climbs, nothing that a shell would understand.
_PLAIN_MODEL = re.compile(r"(?!.*\.\.)\w[\w.:/@+-]*", re.ASCII)


def served(
    type: str,
    command: Sequence[str],
    *,
    path: str,
    health: str = "/health",
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    models: Collection[str] | None = None,
    min_memory_mb: int = 0,
    start_timeout_s: float = 600.0,
    answer_timeout_s: float = 3600.0,
    pinned: bool = False,
) -> None:
    """Register a command that serves a model over HTTP on 127.0.0.1:{port}, for a job type.

    It is up when `health` answers 200; then each payload goes to `path` as JSON, and the answer is the result. The
    command's arguments may hold {port}, {model_id} (one of `models`, or any plain name) and {device}.
    """
    recipe = Recipe(command, path, health, method, headers or {}, models, start_timeout_s, answer_timeout_s)

    class Model(ServedModel):
        pass

    Model.recipe = recipe
    Model.__qualname__ = f"served({type!r})"
    handler(type, min_memory_mb=min_memory_mb, pinned=pinned)(Model)


@dataclass(frozen=True)
class Recipe:
    """What the operator registered, checked when it is: a mistake shows at the worker's start, not at the first job."""

    command: Sequence[str]
    path: str
    health: str = "/health"
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    models: Collection[str] | None = None
    start_timeout_s: float = 600.0
    answer_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError("the command is a list: a program and its arguments")
        if unknown := self._names() - PLACEHOLDERS:
            known = ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
            raise ValueError(f"{sorted(unknown)} in braces is none of {known}; a brace itself is written twice")
        if not (self.path.startswith("/") and self.health.startswith("/")):
            raise ValueError("path and health begin with a slash")
        if min(self.start_timeout_s, self.answer_timeout_s) <= 0:
            raise ValueError("start_timeout_s and answer_timeout_s are more than 0")

    def _names(self) -> set[str]:
        """What stands in braces; with a format or a conversion behind it, it is another name, which nobody knows."""
        found = [braces for part in self.command for _, *braces in Formatter().parse(part)]
        return {"".join(filter(None, braces)) for braces in found if braces[0] is not None}

    def arguments(self, ctx: Context, port: int) -> list[str]:
        """The command for this job's model and device. Raises Permanent when the job's model may not be in it."""
        if "model_id" in self._names():
            self._check(ctx.model_id)
        given = {"port": port, "model_id": ctx.model_id, "device": ctx.device or ""}
        return [part.format_map(given) for part in self.command]

    def _check(self, model_id: str | None) -> None:
        if model_id is None:
            raise Permanent("its model server needs to know which model: give a model_id")
        plain = _PLAIN_MODEL.fullmatch(model_id) is not None
        if not (plain if self.models is None else model_id in self.models):
            raise Permanent(f"model_id {model_id!r} is none that may be served here")


class ServedModel:
    """A class handler whose model lives in a server's process."""

    recipe: ClassVar[Recipe]

    def __init__(self) -> None:
        self._server: Server | None = None
        self._port = 0

    # ── load ────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, ctx: Context) -> None:
        until = time.monotonic() + self.recipe.start_timeout_s
        for _ in range(PORT_TRIES - 1):
            with suppress(PortTaken):
                return self._start(ctx, until)
        return self._start(ctx, until)

    def _start(self, ctx: Context, until: float) -> None:
        self._port = free_port()
        self._server = Server(self.recipe.arguments(ctx, self._port))
        try:
            self._await_health(ctx, self._server, until)
        except BaseException:  # also when it is cancelled: nobody would unload what was never loaded
            self.unload()
            raise

    def _await_health(self, ctx: Context, server: Server, until: float) -> None:
        def look() -> None:
            _watch(ctx, server)
            if time.monotonic() > until:
                limit = f"not healthy within {self.recipe.start_timeout_s:g} s"
                raise ServerNotReady(f"the model server was {limit}; {server.last_words()}")

        while not self._is_well(look):
            look()
            time.sleep(POLL_S)
        # Its port may have become another's, who may be healthy too.
        if not listens(server.pid, self._port):
            raise PortTaken(f"another process answers on port {self._port}, which was meant for the model server")

    def _is_well(self, look: Callable[[], None]) -> bool:
        try:
            question = Request("GET", self.recipe.health, timeout_s=HEALTH_S)
            return ask(self._port, question, self.recipe.headers, look).status == 200
        except (OSError, HTTPException):
            return False

    # ── run ─────────────────────────────────────────────────────────────────────────────────────────────────

    def healthy(self) -> bool:
        """Whether its server is there still; the slot asks before it relies on it."""
        return self._server is not None and not self._server.exited

    def run(self, ctx: Context, payload: Any) -> Any:
        assert self._server is not None, "load comes first"
        answer = self._forward(ctx, self._server, json.dumps(payload).encode())
        if 200 <= answer.status < 300:
            return _result(answer.body, ctx.result_limit)
        if answer.status >= 500:
            self._keep_if_well(self._server)
        raise _refusal(answer)

    def _forward(self, ctx: Context, server: Server, body: bytes) -> Answer:
        recipe = self.recipe
        request = Request(recipe.method, recipe.path, body, ctx.result_limit, recipe.answer_timeout_s)
        look = partial(_watch, ctx, server)
        try:
            return ask(self._port, request, {"Content-Type": "application/json", **recipe.headers}, look)
        except OutOfTime:
            self._keep_if_well(server)  # it stopped working for us when we hung up; loading it anew may take minutes
            raise
        except TimeoutError:
            self.unload()  # it hangs, and would for the next job as well
            raise ServerSilent(f"the model server did not answer within {recipe.answer_timeout_s:g} s") from None
        except (OSError, HTTPException) as broken:
            server.check(EXIT_SHOWS_S)
            self._keep_if_well(server)
            raise ServerFailed(f"the model server broke the connection: {broken!r}") from broken

    def _keep_if_well(self, server: Server) -> None:
        """A server that says itself that it is not well is started anew for the next job."""
        if not self._is_well(server.check):
            self.unload()

    def unload(self) -> None:
        if self._server is not None:
            self._server.stop()


def _watch(ctx: Context, server: Server) -> None:
    """What may happen while one waits for a server: the job is cancelled or out of time, or the server ends."""
    if ctx.cancelled:
        raise Cancelled("while its model server worked on it")
    if ctx.out_of_time:
        raise OutOfTime(f"its model server needs longer than max_runtime_sec = {ctx.max_runtime_sec:g}")
    server.check()


def _result(body: bytes, limit: int) -> Any:
    if len(body) > limit:
        raise Permanent(f"the model server's answer has more than {limit} bytes, the limit of a result")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return {"text": body.decode(errors="replace")}


def _refusal(answer: Answer) -> ServerError | Permanent:
    """An answer that is no success, as the error that it means."""
    said = f"the model server answered {answer.status}: {answer.body[:COMPLAINT].decode(errors='replace')}"
    if answer.status in BUSY:
        return ServerBusy(said, after=_seconds(answer.headers.get("Retry-After")))
    if answer.status >= 500:
        return ServerFailed(said)
    if answer.status < 400:
        said = f"{said} (to {answer.headers.get('Location')}, but redirects are not followed)"
    return Permanent(said)


def _seconds(retry_after: str | None) -> float | None:
    """A pause in seconds, from a number of them or a date; None when the server names none."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
