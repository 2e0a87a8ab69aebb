"""Frames between supervisor and slot."""

import os
import select
import struct
import time

import pytest

from worker.wire import MAX_FRAME, Channel, Frame


@pytest.fixture
def ends():
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def frames(ours):
    """Those that come until there is nothing more."""
    found = []
    while ours.is_readable:
        found += ours.receive_now()
    return found


def raw(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def test_a_frame_comes_as_it_was_sent(ends):
    ours, theirs = ends
    theirs.send({"end": {"outcome": "done"}}, '{"text": "one\ntwo ä"}')
    assert ours.receive() == ({"end": {"outcome": "done"}}, '{"text": "one\ntwo ä"}')


def test_frames_that_were_read_together_are_all_heard(ends):
    """Nothing else would tell of those behind the first."""
    ours, theirs = ends
    for number in range(3):
        theirs.send({"progress": number})
    assert [head["progress"] for head, _ in ours.receive_now()] == [0, 1, 2]
    for number in range(2):
        theirs.send({"progress": number})
    assert [ours.receive()[0]["progress"] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 19])
def test_whoever_must_not_wait_gets_a_frame_when_all_of_it_is_there(ends, cut):
    ours, theirs = ends
    text = raw(b'{"owns": 1}\nbody')
    os.write(theirs.fileno(), text[:cut])
    assert ours.receive_now() == []
    os.write(theirs.fileno(), text[cut:] + text[:2])
    assert ours.receive_now() == [({"owns": 1}, "body")]
    os.write(theirs.fileno(), text[2:])
    assert ours.receive_now() == [({"owns": 1}, "body")]


def test_a_frame_larger_than_the_buffers_arrives(ends):
    ours, theirs = ends
    body = "x" * 3_000_000
    found: list[Frame] = []
    pid = os.fork()
    if pid == 0:  # sending waits for the reader
        theirs.send({"end": 1}, body)
        os._exit(0)
    while not found:
        select.select([ours], [], [])
        found = ours.receive_now()
    os.waitpid(pid, 0)
    assert found == [({"end": 1}, body)]


def test_the_end_of_the_other_side_is_told(ends):
    ours, theirs = ends
    theirs.send({"last": 1})
    theirs.close()
    assert ours.receive_now() == [({"last": 1}, "")]
    assert ours.is_readable
    with pytest.raises(EOFError):
        ours.receive_now()
    with pytest.raises(OSError):
        ours.send({"job": 1})


@pytest.mark.parametrize(
    "garbage", [b"print me\n", struct.pack("!I", MAX_FRAME + 1), raw(b"no json\n"), raw(b"\xff\n")]
)
def test_what_is_no_frame_is_refused(ends, garbage):
    ours, theirs = ends
    os.write(theirs.fileno(), garbage)
    with pytest.raises(ValueError):
        ours.receive_now()


def test_half_a_frame_is_stuck_until_it_goes_on(ends):
    ours, theirs = ends
    text = raw(b'{"owns": 1}\n')
    os.write(theirs.fileno(), text[:6])
    ours.receive_now()
    now = time.monotonic()
    assert not ours.is_stuck(now, 1.0)
    assert ours.is_stuck(now + 1.1, 1.0)
    os.write(theirs.fileno(), text[6:])
    assert frames(ours)
    assert not ours.is_stuck(now + 60, 1.0)


def test_sending_to_one_that_does_not_read_ends(ends):
    ours, _theirs = ends
    ours.limit_sending(1)
    with pytest.raises(OSError):
        ours.send({"job": 1}, "x" * 10_000_000)
