"""A model server as others write them, with switches for everything that can go wrong with one.

    python model_server.py --port 8000 [--switch …]

A request's payload may ask for trouble too: {"answer": 503, "headers": {…}, "body": "…"}, {"exit": 3, "say": "…"},
{"hang": NOTES}, {"drop": true}, {"endless": true}, {"sick": true}, {"close": seconds}. Any other is answered with
itself and who we are.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BODY_MAX = 25_000_000


def switches() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model")
    parser.add_argument("--say", help="print this first")
    parser.add_argument("--exit", type=int, help="end with this code at once")
    parser.add_argument("--kill", action="store_true", help="get SIGKILL at once")
    parser.add_argument("--daemonize", action="store_true")
    parser.add_argument("--unready", type=int, default=0, help="answer the first so many health checks with 503")
    parser.add_argument("--load-until", type=Path, help="listen only when this file is there")
    parser.add_argument("--flood", type=int, default=0, help="print so many MB")
    parser.add_argument("--lines", action="store_true", help="… in lines")
    parser.add_argument("--stubborn", action="store_true", help="take no notice of SIGTERM")
    parser.add_argument("--memory", type=int, help="hold so many MB of the simulated GPU")
    parser.add_argument(
        "--oom-until", type=Path, help="run out of memory unless this file is there; append a line to it"
    )
    return parser.parse_args()


class Api(BaseHTTPRequestHandler):
    unready = 0
    sick = False

    def log_message(self, *_args):
        """Silence is a case too."""

    def do_GET(self):
        if self.path != "/health":
            self._send(404, b"")
        elif self.unready > 0:
            type(self).unready -= 1
            self._send(503, b"loading")
        else:
            self._send(500 if self.sick else 200, b"")

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        if length > BODY_MAX:
            self._send(413, b"too long for me")
            self.close_connection = True
            return
        payload = json.loads(self.rfile.read(length))
        for trouble in ("exit", "hang", "drop", "endless", "sick", "close", "answer"):
            if trouble in payload:
                getattr(self, f"_{trouble}")(payload)
                return
        device = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = {"payload": payload, "pid": os.getpid(), "path": self.path, "device": device, "args": sys.argv[1:]}
        own["headers"] = {name.lower(): value for name, value in self.headers.items()}
        self._send(200, json.dumps(own).encode())

    def _send(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, payload):
        body = payload.get("body", "").encode() + b"x" * payload.get("more", 0)
        self._send(payload["answer"], body, payload.get("headers", {}).items())

    def _exit(self, payload):
        print(payload.get("say", ""), flush=True)
        os._exit(payload["exit"])

    def _close(self, payload):
        """The connection ends before the process does, as when a large one is taken down."""
        print("CUDA out of memory", flush=True)
        self.server.server_close()
        self.connection.shutdown(2)
        time.sleep(payload["close"])
        os._exit(1)

    def _hang(self, payload):
        """Answer never, and note when the other side is gone."""
        notes = Path(payload["hang"])
        notes.write_text("started")
        with contextlib.suppress(ConnectionResetError):
            self.connection.recv(1)
        notes.write_text(f"gone {os.getpid()}")

    def _drop(self, _payload):
        self.close_connection = True
        self.connection.shutdown(2)

    def _endless(self, _payload):
        """Answer until nobody listens any more."""
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                self.wfile.write(b"x" * 10_000)

    def _sick(self, _payload):
        type(self).sick = True
        self._send(500, b"the engine is dead")


class Server(ThreadingHTTPServer):
    allow_reuse_port = False
    block_on_close = False


def main() -> None:
    given = switches()
    if given.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if given.say:
        print(given.say, flush=True)
    for _ in range(given.flood):
        sys.stdout.write((("x" * 99 + "\n") if given.lines else "x" * 100) * 10_000)
    sys.stdout.flush()
    if given.oom_until:
        remember_memory(given.oom_until)
    if given.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if given.exit is not None:
        sys.exit(given.exit)
    if given.daemonize:
        if os.fork():
            os._exit(0)
        signal.alarm(5)  # nobody else ends it
    while given.load_until and not given.load_until.exists():
        time.sleep(0.01)
    Api.unready = given.unready
    with contextlib.ExitStack() as stack:
        if given.memory:
            from orchestrator.gpu import simulated

            stack.enter_context(simulated.allocated(os.environ["CUDA_VISIBLE_DEVICES"], given.memory))
        Server(("127.0.0.1", given.port), Api).serve_forever()


def remember_memory(tries: Path) -> None:
    """There is not enough memory the first time."""
    known = tries.exists()
    with tries.open("a") as file:
        file.write(f"{time.monotonic()}\n")
    if not known:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
