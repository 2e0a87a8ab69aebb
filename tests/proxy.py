"""A TCP proxy that misbehaves on demand, to stand between a client and a real server.

    with Proxy(server.port) as proxy:
        proxy.port
        proxy.stall()            # half-open: connections stay, nothing moves in either direction
        proxy.strand()           # the same for good, but only for the connections there are: new ones work
        proxy.swallow_replies()  # requests arrive, answers get lost
        proxy.lose_reply()       # the next answer gets lost and its connection ends; then all is well
        proxy.cut()              # every connection ends, new ones are welcome
        proxy.refuse()           # every connection ends, new ones are cut at once
        proxy.slow(0.2)          # every piece of data, in either direction, arrives that many seconds later
        proxy.heal()             # new connections work again

What an old connection missed stays missed: its bytes have a hole, so `heal` cuts those that suffered.
"""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.harmed = False
        self.stranded = False

    def close(self) -> None:
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


class Proxy:
    """Forwards to 127.0.0.1:`target` until told otherwise; a new `target` is for connections from then on."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Condition()
        self._links: list[_Link] = []
        self._mode = "pass"
        self._delay_s = 0.0
        self._closed = False
        #: Bytes of answers that were thrown away.
        self.swallowed = 0
        #: Connections ever accepted.
        self.accepted = 0
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()

    def stall(self) -> None:
        self._set("stall")

    def strand(self) -> None:
        with self._lock:
            for link in self._links:
                link.harmed = link.stranded = True

    def swallow_replies(self) -> None:
        self._set("swallow")

    def lose_reply(self) -> None:
        self._set("lose")

    def refuse(self) -> None:
        self._set("refuse")
        self.cut()

    def slow(self, seconds: float) -> None:
        self._delay_s = seconds
        self._set("slow")

    def cut(self) -> None:
        with self._lock:
            links, self._links = self._links, []
            self._lock.notify_all()
        for link in links:
            link.close()

    def heal(self) -> None:
        with self._lock:
            harmed = [link for link in self._links if link.harmed]
            self._links = [link for link in self._links if not link.harmed]
        self._set("pass")
        for link in harmed:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
        self._listener.close()
        self.cut()

    def _set(self, mode: str) -> None:
        with self._lock:
            self._mode = mode
            self._lock.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._mode == "refuse":
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            link = _Link(client, server)
            with self._lock:
                self._links.append(link)
                self.accepted += 1
            for source, sink, replies in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._pump, args=(link, source, sink, replies), name="proxy-pump", daemon=True
                ).start()

    def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._stalls(link):
                    link.harmed = True
                    with self._lock:
                        self._lock.wait_for(lambda: not self._stalls(link) or link not in self._links)
                    break  # what was held back is lost
                if self._mode == "slow":
                    with self._lock:
                        self._lock.wait_for(lambda: self._mode != "slow" or link not in self._links, self._delay_s)
                if replies and self._mode == "swallow":
                    link.harmed = True
                    self.swallowed += len(data)
                    continue
                if replies and self._mode == "lose":
                    self.swallowed += len(data)
                    self._set("pass")
                    with self._lock:
                        self._links.remove(link)
                    break
                sink.sendall(data)
        link.close()

    def _stalls(self, link: _Link) -> bool:
        return link.stranded or self._mode == "stall"
