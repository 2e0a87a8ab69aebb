"""Files of jobs, a JSON object to a line, however many: read lazily, sent in batches, several at a time.

A line without a `job_id` gets one that is made of the import's name, the line's number and its content, so the same
file under the same name is the same jobs, however often it is imported and wherever it was interrupted. A line that
was changed is another job; one that moved to another place in the file is one too.

    lines ▶ `read` ▶ `batches` ▶ `Importing.send`, in threads ▶ settled batches, in the order of the file
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import IO, Any, NamedTuple, NoReturn

from orchestrator import bounded, limits
from orchestrator.bounded import Call
from orchestrator.cancellation import Cancellation
from orchestrator.client.api import Api
from orchestrator.client.errors import ServerUnreachable
from orchestrator.client.patience import BUSY
from orchestrator.client.submitting import BATCH, Encoded, Submitting
from orchestrator.errors import ConfigError, InvalidInput
from orchestrator.jsontext import strict_json
from orchestrator.names import MAX_NAME

#: Bytes of the longest line: the largest payload that servers take by default, escaped, and what is around it.
LINE_BYTES = 5 * 2**20
#: Bytes of one request. Together with the number in flight this is all that an import keeps in memory.
BATCH_BYTES = 2**20
#: Requests at the same time: enough to keep a server busy while it answers others.
THREADS = 4
#: Characters of a name: what is left of an id beside the line's number and the hash of its content.
NAME_CHARACTERS = MAX_NAME - 32
_HASH = 16
#: Bytes that are kept of a line that is too long.
SHOWN_BYTES = 200


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


_decode = json.JSONDecoder(parse_constant=_no_constant).decode

_BLANK = b" \t\r\n"
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Line(NamedTuple):
    number: int
    #: As it stands in the file, without its end; the beginning only, when it is longer than allowed.
    raw: bytes
    #: Bytes of the file up to its end.
    offset: int
    too_long: bool = False


class Refusal(NamedTuple):
    number: int
    raw: bytes
    reason: str


@dataclass
class Batch:
    lines: list[Line] = field(default_factory=list)
    jobs: list[Encoded] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    bytes: int = 0
    #: The last line that was looked at, and where it ends; blank ones count.
    number: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Settled:
    """What became of a batch. With an `error` some of it got no answer: the import ends there.

    `number` is the line up to which everything is settled, `offset` where it ends.
    """

    number: int
    offset: int
    created: int
    existing: int
    refused: tuple[Refusal, ...]
    error: str | None = None
    #: The error is that nobody answers.
    away: bool = False

    @property
    def lines(self) -> int:
        return self.created + self.existing + len(self.refused)


def name_of(path: str) -> str:
    """How an import of this file is called unless somebody says otherwise: its own name, wherever it lies."""
    return _NO_NAME.sub("-", path.replace("\\", "/").rpartition("/")[2]).strip("-.")[:NAME_CHARACTERS] or "import"


def job_id_of(name: str, number: int, raw: bytes) -> str:
    return f"{name}:{number}:{hashlib.sha256(raw).hexdigest()[:_HASH]}"


def read(file: IO[bytes], first: int = 1) -> Iterator[Line]:
    """Lines from this number on. One that is too long is passed over in pieces, not held.

    Raises InvalidInput when that is not even the line behind the last one: nobody stopped there.
    """
    number = offset = 0
    while piece := file.readline(LINE_BYTES + 1):
        number += 1
        offset += len(piece)
        raw, too_long = piece, len(piece) > LINE_BYTES and not piece.endswith(b"\n")
        while too_long and piece and not piece.endswith(b"\n"):
            raw, piece = raw[:SHOWN_BYTES], file.readline(LINE_BYTES)
            offset += len(piece)
        if number >= first:
            yield Line(number, raw.strip(_BLANK), offset, too_long)
    if first > number + 1:
        raise InvalidInput(f"there are only {number} lines: none can be read from line {first} on")


def encode(line: Line, name: str | None) -> Encoded:
    """Raises InvalidInput for what no server would take, ConfigError when it needs a name and there is none."""
    if line.too_long:
        raise InvalidInput(f"longer than {LINE_BYTES} bytes; pass a reference to the data")
    body = _parsed(line.raw)
    if not isinstance(body, dict):
        raise InvalidInput("the line is no JSON object")
    known = body.get("job_id")
    if known is not None:
        return Encoded(str(known), line.raw)
    if name is None:
        raise ConfigError(
            f"line {line.number} has no job_id; say --name NAME: the same lines under the same name are the same jobs"
        )
    job_id = job_id_of(name, line.number, line.raw)
    if "job_id" in body:
        return Encoded(job_id, json.dumps(body | {"job_id": job_id}).encode())
    rest = line.raw[1:].lstrip(_BLANK)
    return Encoded(job_id, b'{"job_id":"%s"%s%s' % (job_id.encode(), b"" if rest == b"}" else b",", rest))


def _parsed(raw: bytes) -> object:
    """Quickly: what the server refuses besides (a key that occurs twice), it refuses for this line alone."""
    try:
        return _decode(raw.decode())
    except (ValueError, RecursionError):
        strict_json(raw, "the line")
        raise


def batches(lines: Iterable[Line], name: str | None) -> Iterator[Batch]:
    """As many lines as fit into a request; those that cannot be sent travel along."""
    batch = Batch()
    for line in lines:
        batch.number, batch.offset = line.number, line.offset
        if not line.raw:
            continue
        try:
            job = encode(line, name)
        except InvalidInput as wrong:
            batch.refused.append(Refusal(line.number, line.raw, str(wrong)))
        else:
            batch.lines.append(line)
            batch.jobs.append(job)
            batch.bytes += len(job.text)
        if len(batch.jobs) + len(batch.refused) >= BATCH or batch.bytes >= BATCH_BYTES:
            yield batch
            batch = Batch()
    if batch.number:
        yield batch


class Importing:
    """One import: `settled` is the whole of it. `stop` ends it: what is on its way settles, nothing more begins."""

    def __init__(self, api: Api, patience_s: float, stop: Cancellation, on_wait: Any = None) -> None:
        self._submitting = Submitting(api, patience_s, on_wait, away_s=patience_s, stop=stop)
        self._stop = stop

    def settled(self, lines: Iterable[Line], name: str | None, threads: int = THREADS) -> Iterator[Settled]:
        """In the order of the file. Raises ServerUnreachable, Refused, or ConfigError as `encode` does."""
        work = self._until_stopped(batches(lines, name))
        lane = limits.of_this_process(threads).io
        whole = Settled(0, 0, 0, 0, ())
        with closing(bounded.stream(work, self.send, lane=lane, in_order=True, name="import")) as answers:
            for count, (index, settled) in enumerate(answers):
                # Behind one that failed nothing counts as settled, be it or not.
                complete = index == count and not settled.error
                whole = settled if complete else replace(settled, number=whole.number, offset=whole.offset)
                yield whole
                if settled.error:
                    return

    def send(self, batch: Batch, _call: Call[Batch]) -> Settled:
        answers = self._submitting.encoded(batch.jobs) if batch.jobs else []
        refused, unsettled = list(batch.refused), []
        for line, answer in zip(batch.lines, answers, strict=True):
            if "created" in answer:
                continue
            problem = answer.get("error") or {"status": 503, "detail": "stopped before it was sent"}
            if problem.get("status") in BUSY:
                unsettled.append(problem)
            else:
                refused.append(Refusal(line.number, line.raw, f"{problem.get('code')}: {problem.get('detail')}"))
        created = [answer["created"] for answer in answers if "created" in answer]
        return Settled(
            number=batch.number,
            offset=batch.offset,
            created=sum(created),
            existing=len(created) - sum(created),
            refused=tuple(sorted(refused)),
            error=str(unsettled[0].get("detail")) if unsettled else None,
            away=any(problem.get("code") == ServerUnreachable.code for problem in unsettled),
        )

    def _until_stopped(self, work: Iterator[Batch]) -> Iterator[Batch]:
        for batch in work:
            if self._stop.cancelled:
                return
            yield batch
