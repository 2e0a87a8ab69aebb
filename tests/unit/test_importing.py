"""Lines become jobs: what is read, which ids they get, and how they are put together."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.client import importing
from orchestrator.client.importing import Line, batches, encode, job_id_of, name_of, read
from orchestrator.errors import ConfigError, InvalidInput
from orchestrator.names import is_name

JOB = b'{"type": "echo", "payload": {}}'


def line(raw: bytes, number: int = 1) -> Line:
    return Line(number, raw, len(raw))


def test_lines_are_numbered_as_editors_do_and_know_where_they_end():
    text = b"a\n\n  b \r\nc"
    found = list(read(io.BytesIO(text)))
    assert [(one.number, one.raw) for one in found] == [(1, b"a"), (2, b""), (3, b"b"), (4, b"c")]
    assert [one.offset for one in found] == [2, 3, 9, 10]
    assert [one.number for one in read(io.BytesIO(text), first=3)] == [3, 4]
    assert list(read(io.BytesIO(b""))) == []


def test_a_line_that_is_too_long_is_passed_over_and_not_held(monkeypatch):
    monkeypatch.setattr(importing, "LINE_BYTES", 300)
    text = b"x" * 300 + b"\n" + b"y" * 301 + b"\n" + b"z" * 5000 + b"\nshort\n" + b"w" * 700
    found = list(read(io.BytesIO(text)))
    assert [(one.number, one.too_long) for one in found] == [(1, False), (2, True), (3, True), (4, False), (5, True)]
    assert all(len(one.raw) <= 300 for one in found) and found[3].raw == b"short"
    assert found[-1].offset == len(text)
    with pytest.raises(InvalidInput, match="longer than 300 bytes"):
        encode(found[1], "name")


def test_an_id_of_its_own_stays_and_the_line_is_sent_as_it_is():
    raw = b'{"job_id": "mine",  "type": "echo", "payload": {}}'
    assert encode(line(raw), None) == ("mine", raw)


@pytest.mark.parametrize(
    "raw", [JOB, b'{ "type": "echo", "payload": {}}', b"{}", b"{ }", b'{"job_id": null, "type": "echo", "payload": {}}']
)
def test_a_line_without_an_id_gets_one(raw):
    job_id, text = encode(line(raw, 7), "file.jsonl")
    assert job_id == job_id_of("file.jsonl", 7, raw) and is_name(job_id)
    without = {key: value for key, value in json.loads(raw).items() if key != "job_id"}
    assert json.loads(text) == {"job_id": job_id} | without


def test_ids_depend_on_name_place_and_content_and_on_nothing_else():
    known = {job_id_of(name, number, raw) for name in ("a", "b") for number in (1, 2) for raw in (b"{}", JOB)}
    assert len(known) == 8
    assert job_id_of("a", 1, JOB) == job_id_of("a", 1, JOB)
    longest = job_id_of("n" * importing.NAME_CHARACTERS, 10**12, JOB)
    assert is_name(longest)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "not JSON"),
        (b"[1]", "no JSON object"),
        (b'"text"', "no JSON object"),
        (b'{"payload": NaN}', "it has no NaN"),
        (b"\xff{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_what_no_server_would_take_is_refused_here(raw, reason):
    with pytest.raises(InvalidInput, match=reason):
        encode(line(raw), "name")


def test_without_a_name_there_is_no_id():
    with pytest.raises(ConfigError, match="line 1 has no job_id; say --name"):
        encode(line(JOB), None)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("jobs.jsonl", "jobs.jsonl"),
        ("/some/where/jobs.jsonl", "jobs.jsonl"),
        ("my jobs (2).jsonl", "my-jobs-2-.jsonl"),
        ("..", "import"),
        ("ü", "import"),
        ("x" * 500, "x" * importing.NAME_CHARACTERS),
    ],
)
def test_a_file_gives_its_name(path, name):
    assert name_of(path) == name and is_name(name)


def test_batches_are_bounded_by_count_and_by_bytes_and_carry_what_is_refused(monkeypatch):
    monkeypatch.setattr(importing, "BATCH", 3)
    monkeypatch.setattr(importing, "BATCH_BYTES", 400)
    long = json.dumps({"type": "echo", "payload": {"x": "y" * 350}}).encode()
    text = b"\n".join([JOB, b"", b"oops", JOB, JOB, long, JOB, b"", b""])
    found = list(batches(read(io.BytesIO(text)), "n"))
    assert [(len(one.jobs), [refusal.number for refusal in one.refused], one.number) for one in found] == [
        (2, [3], 4),
        (2, [], 6),
        (1, [], 9 - 1),
    ]
    assert found[-1].offset == len(text)
    assert next(batches(read(io.BytesIO(b"\n\n")), "n")).number == 2


@given(st.lists(st.binary(max_size=40).filter(lambda raw: b"\n" not in raw), max_size=30))
def test_whatever_the_file_holds_every_line_is_sent_or_refused_once(raws):
    text = b"".join(raw + b"\n" for raw in raws)
    found = list(batches(read(io.BytesIO(text)), "n"))
    numbers = [one.number for batch in found for one in batch.lines] + [
        one.number for batch in found for one in batch.refused
    ]
    assert sorted(numbers) == [n for n, raw in enumerate(raws, 1) if raw.strip(b" \t\r\n")]
