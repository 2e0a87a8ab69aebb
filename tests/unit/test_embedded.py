"""The data directory of a `gpuorch dev` and the Valkey in it, when the disk or the files in it are not as they were."""

import resource
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from orchestrator.embedded.directory import DataDir
from orchestrator.embedded.valkey import Valkey
from orchestrator.errors import ConfigError, RedisUnavailable
from orchestrator.settings import Settings
from orchestrator.stream.client import connect


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """What a full disk does to whoever writes, on a disk that others use."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def directory(tmp_path) -> Iterator[DataDir]:
    with closing(DataDir(tmp_path / "data")) as held:
        yield held


@pytest.fixture
def start(directory) -> Iterator:
    """Start a Valkey in the directory; a plain client of it."""
    started: list[Valkey] = []

    def begin():
        started.append(Valkey(directory))
        started[-1].start()
        return connect(Settings(redis_url=started[-1].url))

    yield begin
    for one in started:
        one.stop()


def test_a_directory_without_room_for_its_lock_is_refused_and_not_held(tmp_path):
    with no_file_longer_than(0), pytest.raises(ConfigError, match=r"data_dir .*: File too large; .* choose another"):
        DataDir(tmp_path)
    DataDir(tmp_path).close()


def test_without_room_for_its_configuration_it_says_so_and_stops_like_any_other(directory):
    valkey = Valkey(directory)
    with no_file_longer_than(10), pytest.raises(ConfigError, match=r"data_dir .*: File too large; .* choose another"):
        valkey.start()
    valkey.stop()


def test_a_log_that_cannot_be_written_is_named(directory):
    (directory.path / "valkey.log").mkdir()
    valkey = Valkey(directory)
    with pytest.raises(ConfigError, match=r"valkey\.log: Is a directory"):
        valkey.start()
    valkey.stop()


def garbled(data: Path, pattern: str) -> None:
    (file,) = (data / "appendonlydir").glob(pattern)
    file.write_bytes(b"*3\r\nnonsense")


@pytest.mark.parametrize("pattern", ["*.incr.aof", "*.base.rdb", "*.manifest"])
def test_writes_that_cannot_be_read_again_are_put_aside_and_it_starts_empty(directory, start, caplog, pattern):
    with start() as client:
        client.set("kept", 1)
        client.shutdown()
    garbled(directory.path, pattern)
    with start() as client:
        assert client.keys() == []
    (aside,) = directory.path.glob("appendonlydir.unreadable-*")
    (warned,) = [record for record in caplog.records if "put aside" in record.message]
    assert warned.path == str(aside) and list(aside.glob(pattern)), "nothing of it is lost"


def test_whatever_else_keeps_it_from_starting_is_told_and_leaves_its_writes_alone(directory, start):
    with start() as client:
        client.set("kept", 1)
        client.shutdown()
    valkey = Valkey(directory)
    with socket.create_server(("127.0.0.1", valkey._port)), pytest.raises(RedisUnavailable, match="already in use"):
        valkey.start()
    assert (directory.path / "appendonlydir").exists()
