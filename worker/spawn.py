"""Adding tasks from a running handler: collected here, sent to the supervisor in frames of bounded size.

They are staged beside the attempt and become jobs when it succeeds, all of them or none (`store.spawning`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from orchestrator.identity import fresh_id
from orchestrator.jsontext import canonical_json
from orchestrator.spawning import MAX_TASKS, task_id

#: Characters of a frame, and entries in it, beyond which it is sent.
FRAME, ENTRIES = 262_144, 500
#: Items to a part of a map, unless somebody says otherwise.
CHUNK = 10_000
#: Levels of JSON that a payload may have, as one that is submitted by default; and those around it.
DEPTH, AROUND = 64, 4


@dataclass(frozen=True)
class Added:
    """What was added: a task, or the one that gets the results of a map. May be named in `depends_on`."""

    job_id: str
    #: How many tasks it stands for, with the one that collects.
    tasks: int = 1
    #: None: of a map that nobody collects.
    number: int | None = None


class Stage:
    """The tasks that one attempt adds.

    A call that raises added nothing, and the handler may go on; or, where that cannot be undone (a map whose iterator
    broke behind its first parts, a frame that was not kept), the attempt fails with that error, whoever caught it.
    """

    def __init__(self, send: Callable[[int, str], None], max_bytes: int) -> None:
        """`send(number, frame)` keeps a frame until the attempt has ended; it raises when that is not possible."""
        self._send = send
        self._max_bytes = max_bytes
        self._base = fresh_id("task")
        self._lock = threading.RLock()
        self._entries: list[str] = []
        self._size = 0
        self._frames = 0
        #: Why only half of what was asked for was added.
        self._broken: BaseException | None = None
        #: Tasks so far.
        self.count = 0

    def spawn(self, type: str, payload: Mapping[str, Any] | None, needs: Sequence[Added], **fields: Any) -> Added:
        numbers = [_number(one) for one in needs]
        with self._lock:
            self._check_whole()
            number = self._add(1, {"type": type, "payload": payload or {}, "needs": numbers, **fields})
        return Added(task_id(self._base, number), 1, number)

    def map(
        self,
        type: str,
        items: Iterable[Any],
        chunk: int,
        then: tuple[str, Mapping[str, Any]] | None,
        shared: Mapping[str, Any],
        **fields: Any,
    ) -> Added:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, not {chunk}")
        with self._lock:
            # Whoever collects is made a job before its parts, which may come from an iterator: its frame is kept free.
            self.flush()
            with self._whole_or_nothing(self.count + (then is not None)):
                collecting, first_frame = (self._take(1) if then else None), self._frames
                self._frames += 1
                part = {"type": type, "payload": dict(shared), "then": collecting, **fields}
                collector: dict[str, Any] = {"n": collecting, "count": 1, "parts": 0, **_options_of(fields)}
                if then is not None:
                    collector |= {"type": then[0], "payload": then[1]}
                    self._text(collector)  # one that cannot be written must not come to light behind its parts
                parts = self._range(part, items, chunk) if isinstance(items, range) else self._items(part, items, chunk)
                self.flush()
                if then is not None:
                    self._send_frame(first_frame, [self._text(collector | {"parts": parts})])
        job_id = task_id(self._base, collecting) if collecting is not None else ""
        return Added(job_id, parts + (then is not None), collecting)

    def flush(self) -> None:
        """Send what is collected. Raises what broke an earlier call halfway."""
        with self._lock:
            self._check_whole()
            if self._entries:
                number, self._frames = self._frames, self._frames + 1
                entries, self._entries, self._size = self._entries, [], 0
                self._send_frame(number, entries)

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise self._broken

    @contextmanager
    def _whole_or_nothing(self, without_parts: int) -> Iterator[None]:
        """As if nobody had asked, if it fails while there are no more tasks than these; broken after that."""
        count, frames = self.count, self._frames
        try:
            yield
        except BaseException as error:
            if self.count > without_parts:
                self._broken = self._broken or error
            else:
                self.count, self._frames = count, frames
            raise

    def _send_frame(self, number: int, entries: Sequence[str]) -> None:
        try:
            self._send(number, f'{{"base":"{self._base}","entries":[{",".join(entries)}]}}')
        except BaseException as error:
            self._broken = error
            raise

    def _range(self, part: dict[str, Any], items: range, chunk: int) -> int:
        """One entry, however many parts."""
        parts = -(-len(items) // chunk)
        if parts:
            span = [items.start, items.stop, items.step]
            self._add(parts, part | {"range": span, "chunk": chunk, "index": 0})
        return parts

    def _items(self, part: dict[str, Any], items: Iterable[Any], chunk: int) -> int:
        parts = 0
        for group in _grouped(items, chunk, self._max_bytes):
            self._add(len(group), part | {"items": group, "index": parts})
            parts += len(group)
        return parts

    def _take(self, count: int) -> int:
        """The number of the first of so many more tasks."""
        self._check_room(count)
        self.count += count
        return self.count - count

    def _check_room(self, count: int) -> None:
        if self.count + count > MAX_TASKS:
            raise ValueError(f"a job may add {MAX_TASKS:,} tasks at most; map over larger chunks")

    def _add(self, count: int, entry: dict[str, Any]) -> int:
        """So many tasks; the number of the first. They count once they could be written down."""
        self._check_room(count)
        text = self._text({"n": self.count, "count": count, **entry})
        if self._entries and self._size + len(text) > FRAME:
            self.flush()
        number = self._take(count)
        self._entries.append(text)
        self._size += len(text)
        if self._size > FRAME or len(self._entries) >= ENTRIES:
            self.flush()
        return number

    def _text(self, entry: dict[str, Any]) -> str:
        text = canonical_json(entry, "a task", DEPTH + AROUND)
        if "items" not in entry and len(text) > self._max_bytes + 65_536:
            raise ValueError(f"a payload is larger than {self._max_bytes} bytes; pass a reference to the data")
        return text


def _grouped(items: Iterable[Any], chunk: int, max_bytes: int) -> Iterator[list[list[Any]]]:
    """Parts of so many items each, as many at a time as are worth a frame."""
    source = iter(items)
    group: list[list[Any]] = []
    size = 0
    while part := list(islice(source, chunk)):
        length = len(canonical_json(part, "items", DEPTH))
        if length > max_bytes:
            raise ValueError(f"a part of {len(part)} items has {length} bytes, {max_bytes} are allowed; lower `chunk`")
        if group and size + length > FRAME // 2:
            yield group
            group, size = [], 0
        group.append(part)
        size += length + 1
    if group:
        yield group


def _options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Whoever collects a map is in the pool of its parts, and is critical whatever they are."""
    return {"options": fields.get("options", {})}


def _number(one: Added) -> int:
    if not isinstance(one, Added):
        raise TypeError(f"depends_on takes what spawn and map returned, not {type(one).__name__}")
    if one.number is None:
        raise ValueError("depends_on names a map that nobody collects; give it `then`")
    return one.number
