"""One server over HTTP, for threads. The command line and `Client` speak through it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Generator, Mapping
from contextlib import closing
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from orchestrator import bounded
from orchestrator.cancellation import Cancellation
from orchestrator.client import wire
from orchestrator.client.steps import NOTHING, TIMEOUT_S, Emit, Fan, Operation, Pause, Play, Request
from orchestrator.errors import OrchestratorError

R = TypeVar("R")


class Api:
    """Threads may share one."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises ConfigError when this is no URL of a server."""
        self._client = httpx.Client(**wire.connection(url))
        self.url = url.rstrip("/")
        self.contact = wire.Contact()

    def get(self, path: str, params: Mapping[str, object] = NOTHING, wait_s: float = 0.0) -> Any:
        return self.send(Request("GET", path, params, timeout_s=TIMEOUT_S + wait_s))

    def post(
        self,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        wait_s: float = 0.0,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """A body of bytes is JSON already."""
        return self.send(Request("POST", path, body=body, timeout_s=timeout_s + wait_s))

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        return self.send(Request("PUT", path, body=body))

    def patch(self, path: str, body: Mapping[str, object]) -> Any:
        return self.send(Request("PATCH", path, body=body))

    def delete(self, path: str) -> Any:
        return self.send(Request("DELETE", path))

    def send(self, request: Request) -> Any:
        """The answer's JSON. Raises ServerUnreachable or Refused."""
        try:
            response = self._client.request(request.method, request.path, **wire.arguments(request))
        except wire.UNANSWERED as error:
            raise wire.unreachable(self.url, error) from None
        self.contact.note()
        return wire.answer_of(response)

    def run(self, operation: Operation[R], token: Cancellation | None = None) -> R:
        """What the operation returns; what a fan in it emits is collected. A cancelled `token` ends it with Aborted."""
        with Play(operation) as play:
            while play.step is not None:
                if isinstance(play.step, Fan):
                    play.answer(list(self.fan_out(play.step)))
                else:
                    self._perform(play, token)
            return play.result

    def iterate(self, operation: Operation[None]) -> Generator[Any, None, None]:
        """What the operation emits, as it does."""
        with Play(operation) as play:
            while play.step is not None:
                if isinstance(play.step, Emit):
                    yield play.step.value
                    play.answer()
                elif isinstance(play.step, Fan):
                    yield from self.fan_out(play.step)
                    play.answer()
                else:
                    self._perform(play)

    def fan_out(self, fan: Fan) -> Generator[Any, None, None]:
        if isinstance(fan.items, AsyncIterable):
            raise TypeError("what is iterated over by `async for` is for AsyncClient")
        rounds = bounded.stream(
            fan.items,
            lambda item, call: self.run(fan.each(item), call.token),
            lane=fan.lane,
            max_bytes=fan.max_bytes,
            size_of=fan.size_of,
            in_order=True,
            name=fan.name,
        )
        with closing(rounds):
            for _, emitted in rounds:
                yield from emitted

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _perform(self, play: Play[Any], token: Cancellation | None = None) -> None:
        try:
            if token is not None:
                token.raise_if_cancelled()
            if isinstance(play.step, Request):
                answer = self.send(play.step)
            else:
                assert isinstance(play.step, Pause)
                answer = _sleep(play.step, token)
        except OrchestratorError as error:
            play.fail(error)
        else:
            play.answer(answer)


def _sleep(pause: Pause, token: Cancellation | None) -> bool:
    """Whether it was ended by its `stop`. Raises Aborted."""
    if pause.stop is not None:
        return pause.stop.wait(pause.seconds)
    if token is None:
        time.sleep(max(pause.seconds, 0.0))
    elif token.wait(pause.seconds):
        token.raise_if_cancelled()
    return False
