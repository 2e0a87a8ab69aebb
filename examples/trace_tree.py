"""A receiver of spans for the terminal: takes OTLP over HTTP and prints each trace as a tree once it is quiet.

    pip install '/path/to/clone[tracing]'
    python examples/trace_tree.py --port 4318
    ORCH_OTLP_ENDPOINT=http://127.0.0.1:4318 gpuorch dev

For looking at a trace or two without a collector; it keeps spans in memory only.
"""

import argparse
import gzip
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

try:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Status
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}; install the extra: pip install '/path/to/clone[tracing]'")

#: Attributes worth a place in a line, by the name that they get there.
SHOWN = {
    "job.attempt": "attempt",
    "job.outcome": "outcome",
    "job.status": "status",
    "lease.mode": "lease",
    "error.type": "refused",
}


class Traces:
    """Spans by trace, and when the last of each came."""

    def __init__(self):
        self._lock = Lock()
        self._spans = {}
        self._heard = {}

    def add(self, body):
        with self._lock:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {one.key: plain(one.value) for one in of_resource.resource.attributes}
                for of_scope in of_resource.scope_spans:
                    for span in of_scope.spans:
                        self._spans.setdefault(span.trace_id, []).append((span, about.get("service.name", "?")))
                        self._heard[span.trace_id] = time.monotonic()

    def take_quiet(self, seconds):
        with self._lock:
            quiet = [one for one, heard in self._heard.items() if time.monotonic() - heard > seconds]
            return {one: (self._heard.pop(one), self._spans.pop(one))[1] for one in quiet}


def plain(value):
    kind = value.WhichOneof("value")
    return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind or "", "")


def tree(spans):
    """The lines of one trace: name, when it began and how long it took, in milliseconds, and what it tells."""
    spans = sorted(spans, key=lambda one: (one[0].start_time_unix_nano, one[0].end_time_unix_nano))
    known = {span.span_id for span, _ in spans}
    children = {}
    for span, service in spans:
        parent = span.parent_span_id if span.parent_span_id in known else b""
        children.setdefault(parent, []).append((span, service))
    names = {span.span_id: f"{span.name} {told(span, {'job.attempt': 'attempt'})}" for span, _ in spans}
    begun = spans[0][0].start_time_unix_nano
    lines = [f"trace {spans[0][0].trace_id.hex()}: {len(spans)} spans", f"{'begin':>10} {'took':>10}  ms"]

    def show(parent, indent):
        below = children.get(parent, [])
        for number, (span, service) in enumerate(below):
            last = number == len(below) - 1
            branch = "" if not parent else indent + ("└─ " if last else "├─ ")
            began = (span.start_time_unix_nano - begun) / 1e6
            took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
            links = "".join(f"  ↩ {names.get(link.span_id, link.span_id.hex())}" for link in span.links)
            lines.append(f"{began:10.1f} {took:10.1f}  {branch}{span.name} {told(span)} ({service}){links}")
            show(span.span_id, "" if not parent else indent + ("   " if last else "│  "))

    show(b"", "")
    return "\n".join(lines)


def told(span, shown=SHOWN):
    about = {one.key: plain(one.value) for one in span.attributes}
    parts = [f"{name}={about[key]}" for key, name in shown.items() if key in about]
    if span.status.code == Status.STATUS_CODE_ERROR and shown is SHOWN:
        parts.append(f"ERROR {span.status.message.strip().rpartition(chr(10))[2]!r}")
    return " ".join(parts)


def serve(port):
    """Listens on the loopback address; what it heard."""
    traces = Traces()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            traces.add(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            """The trees are all that is to be seen."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    Thread(target=server.serve_forever, name="receiver", daemon=True).start()
    return server, traces


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds without a span after which a trace is printed"
    )
    parser.add_argument("--traces", type=int, default=0, help="end after so many (default: go on)")
    options = parser.parse_args()
    server, traces = serve(options.port)
    print(f"waiting for spans at http://127.0.0.1:{server.server_port}/v1/traces", flush=True)
    printed = 0
    try:
        while not options.traces or printed < options.traces:
            time.sleep(0.2)
            for spans in traces.take_quiet(options.quiet).values():
                print(f"\n{tree(spans)}", flush=True)
                printed += 1
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
