"""HTTP as uvicorn reads it, with an end to what a request may be before it is one.

A head has so many bytes and so many seconds: whoever sends no end of it would hold memory and a file for ever. Bodies
are counted where they are read (`orchestrator.api.body`); connections between two requests end by uvicorn's own limit.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from orchestrator.api.problems import FRAMEWORK_CODES, problem, reply

#: Bytes of the longest head: the first line and all headers.
HEAD_LIMIT = 65_536
#: Seconds a head may take to arrive, and what is left of a body that nobody reads.
ARRIVAL_LIMIT_S = 10.0


class Protocol(HttpToolsProtocol):
    """What cannot be read is answered like every other error."""

    #: Bytes that came since something became of them; those of a head, of trailers, or of nothing.
    _unread = 0
    _refused = False
    _hangup: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self._refused:
            room = HEAD_LIMIT - self._unread
            piece, data = data[:room], data[room:]
            self._unread += len(piece)
            super().data_received(piece)
            if self._unread >= HEAD_LIMIT:
                self._refuse(431, f"the head of a request has less than {HEAD_LIMIT} bytes")
        if self._unread and not self._answering():
            self._hurry()

    def on_headers_complete(self) -> None:
        self._unread = 0
        self._calm()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        self._calm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # Nobody read it, and each byte of it puts off the end of an idle connection. Of another request that waits in
        # the pipeline nobody knows yet.
        left = self.cycle.more_body and not self.pipeline
        super().on_response_complete()
        if left:
            self._hurry()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, detail: str) -> None:
        """Say why and read no more; to hang up under one that still writes would take the answer from it."""
        self._refused = True
        if self._answering():
            self.transport.close()  # what is on its way answers another request
            return
        answer = reply(problem(status, FRAMEWORK_CODES[status], detail), {"Connection": "close"})
        fields = b"".join(b"%s: %s\r\n" % field for field in answer.raw_headers)
        self.transport.write(STATUS_LINE[status] + fields + b"\r\n" + bytes(answer.body))
        self.transport.write_eof()
        self._hurry()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _hurry(self) -> None:
        if self._hangup is None and not self.transport.is_closing():
            self._hangup = self.loop.call_later(ARRIVAL_LIMIT_S, self.transport.close)

    def _calm(self) -> None:
        if self._hangup is not None:
            self._hangup.cancel()
            self._hangup = None
