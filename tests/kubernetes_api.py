"""A server that stands in for Kubernetes' API: it keeps what it is asked, and answers what its heirs say."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self


class Asked(NamedTuple):
    method: str
    path: str
    token: str | None
    kind: str | None
    body: Any


class KubernetesApi:
    def __init__(self) -> None:
        self.requests: list[Asked] = []
        #: Until it is set, whoever is to wait gets no answer.
        self.speak = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        """The status and the body."""
        raise NotImplementedError

    @contextmanager
    def serving(self) -> Iterator[Self]:
        threading.Thread(target=self._server.serve_forever, name="kubernetes-api", daemon=True).start()
        try:
            yield self
        finally:
            self.speak.set()
            self._server.shutdown()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_PATCH(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                named = self.headers.get("Authorization"), self.headers.get("Content-Type")
                asked = Asked(self.command, self.path, *named, body)
                api.requests.append(asked)
                status, text = api.answer(asked)
                with suppress(OSError):  # whoever asked has gone
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *_args: object) -> None:
                pass

        return Handler
