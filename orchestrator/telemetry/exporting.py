"""Spans on their way out: a bounded queue, a thread, and patience with nobody.

A receiver that is away or hangs costs spans and nothing else: those that find no room are dropped, and a warning says
so once in a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from orchestrator.telemetry.guard import Losses

log = logging.getLogger(__name__)
# It has a line for each try of each batch.
logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)

#: Spans that wait to be sent, and how many of them one request takes.
QUEUE, BATCH = 8192, 512
#: Characters of spans of slots that wait to be sent, as they came: these are as large as their handlers want.
CARRIED = 64 * 1024 * 1024
#: Milliseconds after which a span is sent.
LINGER_MS = 500
#: Seconds for one batch, all tries of it included.
EXPORT_S = 5.0
#: Seconds that the end of a process may take for what is not sent yet.
CLOSE_S = 2.0


class Patient(SpanExporter):
    """Sends spans, and bears that it cannot; says so once in a while."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._losses = Losses(endpoint)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            sent = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever a network can do, or a span
            log.debug("export broke", extra={"error": str(error)})
            return self._export_good(spans)
        if sent is not SpanExportResult.SUCCESS:
            self._losses.add(len(spans))
        return sent

    def _export_good(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Once more, without those that cannot be encoded; if there are none, it was not their fault."""
        good = [span for span in spans if _can_be_encoded(span)]
        if not good or len(good) == len(spans):
            self._losses.add(len(spans))
            return SpanExportResult.FAILURE
        self._losses.add(len(spans) - len(good))
        return self.export(good)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _can_be_encoded(span: ReadableSpan) -> bool:
    try:
        encode_spans([span])
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        return False
    return True


def exporter_to(endpoint: str) -> SpanExporter:
    return Patient(OTLPSpanExporter(endpoint, timeout=EXPORT_S), endpoint)


def probe(endpoint: str) -> bool:
    """Whether it takes a request without any span."""
    return OTLPSpanExporter(endpoint, timeout=CLOSE_S).export(()) is SpanExportResult.SUCCESS


def queue_to(exporter: SpanExporter) -> BatchSpanProcessor:
    return BatchSpanProcessor(exporter, QUEUE, schedule_delay_millis=LINGER_MS, max_export_batch_size=BATCH)


class Room:
    """How much of what slots sent is still here: it has left when nobody has its spans any more, sent or dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: WeakKeyDictionary[ReadableSpan, int] = WeakKeyDictionary()

    def has(self, size: int) -> bool:
        with self._lock:
            return sum(self._sizes.values()) + size <= CARRIED

    def fill(self, span: ReadableSpan, size: int) -> None:
        with self._lock:
            self._sizes[span] = size


def close(queue: BatchSpanProcessor) -> None:
    """Send what waits, within `CLOSE_S`. Whoever is left then is a daemon, and ends with the process."""
    closing = threading.Thread(target=queue.shutdown, name="trace-close", daemon=True)
    closing.start()
    closing.join(CLOSE_S)
