"""`gpuorch scaler` as a real process, and a client of KEDA's protocol to ask it."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from orchestrator.settings import Settings
from tests.cluster import Cluster, Member
from tests.conftest import SHORT
from tests.forked import Forked
from tests.servers import MariaDB, Redis
from tests.tables import make_tables
from tests.waiting import wait_until


@contextmanager
def new_cluster(mariadb: MariaDB, redis_server: Redis, folder: Path) -> Iterator[Cluster]:
    redis_server.flush()
    given = SHORT | {
        "database_url": mariadb.create_database(f"scaler_{secrets.token_hex(4)}"),
        "redis_url": redis_server.url,
        "data_dir": folder,
        "gpu_backend": "none",
        "worker_timeout_s": 20.0,
    }
    opened = Cluster(Settings(**given), folder, forked=True)
    make_tables(opened.db.engine)
    yield opened
    opened.close()


@pytest.fixture
def cluster(mariadb: MariaDB, redis_server: Redis, tmp_path: Path) -> Iterator[Cluster]:
    """One whose members may be killed."""
    with new_cluster(mariadb, redis_server, tmp_path) as opened:
        yield opened


class Served(NamedTuple):
    cluster: Cluster
    url: str
    scaler: "Scaler"
    address: str


@pytest.fixture(scope="module")
def shared(mariadb: MariaDB, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An orchestrator and a scaler that go on; each test has a pool of its own."""
    folder = tmp_path_factory.mktemp("shared")
    with new_cluster(mariadb, redis_server, folder) as opened:
        _, url = opened.serve()
        scaler = Scaler(url, folder)
        yield Served(opened, url, scaler, scaler.address())
        scaler.kill()


@pytest.fixture
def pool() -> str:
    return f"pool-{secrets.token_hex(4)}"


class Scaler(Member):
    """The process, and calls as KEDA makes them."""

    def __init__(self, url: str, folder: Path, *flags: str) -> None:
        self.log = folder / f"scaler-{secrets.token_hex(4)}.log"
        command = ["scaler", "--port", "0", "--url", url, *flags]
        self.process = Forked(
            command, dict(os.environ), self.log, loaded=("orchestrator.cli", "orchestrator.scaler.server")
        )

    def address(self) -> str:
        return self.says(r"gpuorch scaler listens on (\S+)")[1]


@pytest.fixture
def start_scaler(tmp_path: Path) -> Iterator[Callable[..., Scaler]]:
    started: list[Scaler] = []

    def start(url: str, *flags: str) -> Scaler:
        started.append(Scaler(url, tmp_path, *flags))
        return started[-1]

    yield start
    for one in started:
        one.kill()


class Keda:
    """A client of the protocol. Its messages are written down here once more: a slip in ours would show.

    A `patient` one asks again, as KEDA does, where the orchestrator could not answer in time: the machine is busy.
    """

    def __init__(self, channel: grpc.Channel, *, patient: bool = False) -> None:
        self.channel, self._patient = channel, patient
        self._types = _types()

    def ref(self, **metadata: str) -> Any:
        return self._types["ScaledObjectRef"](name="embed", namespace="models", scalerMetadata=metadata)

    def is_active(self, timeout: float = 10.0, **metadata: str) -> bool:
        return bool(
            self._unary("IsActive", "ScaledObjectRef", "IsActiveResponse")(self.ref(**metadata), timeout=timeout).result
        )

    def spec(self, **metadata: str) -> Any:
        call = self._unary("GetMetricSpec", "ScaledObjectRef", "GetMetricSpecResponse")
        (spec,) = call(self.ref(**metadata), timeout=10).metricSpecs
        return spec

    def metric(self, name: str = "", **metadata: str) -> Any:
        request = self._types["GetMetricsRequest"](scaledObjectRef=self.ref(**metadata), metricName=name)
        (value,) = self._unary("GetMetrics", "GetMetricsRequest", "GetMetricsResponse")(
            request, timeout=10
        ).metricValues
        return value

    def stream(self, timeout: float = 60.0, **metadata: str) -> Any:
        """Answers as they come; cancel it when done."""
        call = self.channel.unary_stream(
            "/externalscaler.ExternalScaler/StreamIsActive",
            self._types["ScaledObjectRef"].SerializeToString,
            self._types["IsActiveResponse"].FromString,
        )
        return call(self.ref(**metadata), timeout=timeout)

    def _unary(self, name: str, asks: str, answers: str) -> Any:
        call = self.channel.unary_unary(
            f"/externalscaler.ExternalScaler/{name}",
            self._types[asks].SerializeToString,
            self._types[answers].FromString,
        )
        return partial(_answered, call) if self._patient else call


def _answered(call: Any, request: Any, timeout: float) -> Any:
    def ask() -> Any:
        try:
            return (call(request, timeout=timeout),)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return None
            raise

    (answer,) = wait_until(ask, what="an answer")
    return answer


_STRING, _BOOL, _INT, _DOUBLE, _MESSAGE = 9, 8, 3, 1, 11


def _types() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="keda.proto", package="externalscaler", syntax="proto3")

    def add(parent: Any, name: str, *fields: tuple[str, int, int, str]) -> Any:
        made = parent.add(name=name)
        for field, number, kind, of in fields:
            repeated = of.startswith("repeated ")
            one = made.field.add(name=field, number=number, type=kind, label=3 if repeated else 1)
            if kind == _MESSAGE:
                one.type_name = ".externalscaler." + of.removeprefix("repeated ")
        return made

    many = "repeated ScaledObjectRef.ScalerMetadataEntry"
    ref = add(
        file.message_type,
        "ScaledObjectRef",
        ("name", 1, _STRING, ""),
        ("namespace", 2, _STRING, ""),
        ("scalerMetadata", 3, _MESSAGE, many),
    )
    add(
        ref.nested_type, "ScalerMetadataEntry", ("key", 1, _STRING, ""), ("value", 2, _STRING, "")
    ).options.map_entry = True
    add(file.message_type, "IsActiveResponse", ("result", 1, _BOOL, ""))
    add(
        file.message_type,
        "MetricSpec",
        ("metricName", 1, _STRING, ""),
        ("targetSize", 2, _INT, ""),
        ("targetSizeFloat", 3, _DOUBLE, ""),
    )
    add(file.message_type, "GetMetricSpecResponse", ("metricSpecs", 1, _MESSAGE, "repeated MetricSpec"))
    add(
        file.message_type,
        "GetMetricsRequest",
        ("scaledObjectRef", 1, _MESSAGE, "ScaledObjectRef"),
        ("metricName", 2, _STRING, ""),
    )
    add(
        file.message_type,
        "MetricValue",
        ("metricName", 1, _STRING, ""),
        ("metricValue", 2, _INT, ""),
        ("metricValueFloat", 3, _DOUBLE, ""),
    )
    add(file.message_type, "GetMetricsResponse", ("metricValues", 1, _MESSAGE, "repeated MetricValue"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}")) for name in names
    }


@pytest.fixture
def connect() -> Iterator[Callable[..., Keda]]:
    channels: list[grpc.Channel] = []

    def to(address: str, credentials: Any = None, *, patient: bool = False, **options: str) -> Keda:
        given = [(f"grpc.{name}", value) for name, value in options.items()]
        made = (
            grpc.secure_channel(address, credentials, given) if credentials else grpc.insecure_channel(address, given)
        )
        channels.append(made)
        return Keda(made, patient=patient)

    yield to
    for one in channels:
        one.close()
