"""A real receiver of OTLP over HTTP, and what it received in a form that is easy to ask."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Received:
    """One span."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    error: str | None
    events: dict[str, dict[str, Any]]
    links: tuple[str, ...]


@dataclass
class Receiver:
    url: str = ""
    spans: list[Received] = field(default_factory=list)
    requests: int = 0
    #: Requests wait while it is clear.
    open: threading.Event = field(default_factory=threading.Event)
    broken: bool = False

    def take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _plain(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [_received(span, service) for span in of_scope.spans]

    def named(self, name: str, **attributes: Any) -> list[Received]:
        """Spans of that name whose attributes are these (`_` for `.`), oldest first."""
        wanted = {key.replace("_", ".", 1): value for key, value in attributes.items()}
        found = [one for one in list(self.spans) if one.name == name and wanted.items() <= one.attributes.items()]
        return sorted(found, key=lambda one: one.start)

    def one(self, name: str, **attributes: Any) -> Received:
        found = self.named(name, **attributes)
        assert len(found) == 1, f"{len(found)} of {name} {attributes} among {[span.name for span in self.spans]}"
        return found[0]


def _received(span: trace_pb2.Span, service: str) -> Received:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return Received(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        span.status.message if failed else None,
        {event.name: _plain(event.attributes) for event in span.events},
        tuple(link.span_id.hex() for link in span.links),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


@contextmanager
def receiving() -> Iterator[Receiver]:
    """On a free port of the loopback address."""
    receiver = Receiver()
    receiver.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.requests += 1
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            receiver.open.wait(60)
            well = self.path == "/v1/traces" and not receiver.broken
            if well:
                receiver.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200 if well else 400)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """What it received is asked for."""

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                return  # whoever spoke to it is gone

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="receiver", daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.open.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
