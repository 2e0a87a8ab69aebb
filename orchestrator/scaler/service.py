"""The four calls of KEDA, answered from a `Watch`.

A ScaledObject's metadata says which pool it means (`poolId`), by what it scales (`metric`: `desired_workers`, which is
the default, or `depth` or `waiting`) and how much of that one worker takes (`targetValue`, 1 by default).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc

from orchestrator.client.errors import Refused
from orchestrator.errors import InvalidInput, OrchestratorError, Overloaded
from orchestrator.names import is_name
from orchestrator.scaler import protocol
from orchestrator.scaler.watch import Watch

#: What may be scaled by: numbers of `GET /autoscale/{pool_id}`.
METRICS = ("desired_workers", "depth", "waiting")
#: Streams that may be open: each holds a thread.
MOST_STREAMS = 200
#: Seconds after which a stream looks whether anybody still hears it.
LOOK_EVERY_S = 1.0

Context = Any


class Aim(NamedTuple):
    """What a ScaledObject asks for."""

    pool_id: str
    metric: str
    target: float

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Aim:
        """Raises InvalidInput."""
        pool_id = metadata.get("poolId", "")
        if not is_name(pool_id):
            raise InvalidInput("metadata.poolId must name a pool; `default` is the lane of jobs without one", "poolId")
        metric = metadata.get("metric", METRICS[0])
        if metric not in METRICS:
            raise InvalidInput(f"metadata.metric must be one of {', '.join(METRICS)}", "metric")
        return cls(pool_id, metric, _target(metadata.get("targetValue", "1")))


def _target(text: str) -> float:
    try:
        target = float(text)
    except ValueError:
        target = math.nan
    if not (math.isfinite(target) and target > 0):
        raise InvalidInput("metadata.targetValue must be a number above 0", "targetValue")
    return target


class Scaler:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)

    def is_active(self, ref: Any, context: Context) -> Any:
        with _told(context):
            return protocol.IsActiveResponse(result=_active(self._watch.ask(_aim(ref).pool_id)))

    def stream_is_active(self, ref: Any, context: Context) -> Iterator[Any]:
        """Now and at every change. While nobody knows, nothing is said: KEDA keeps what it has."""
        with _told(context):
            pool_id = _aim(ref).pool_id
            if not self._streams.acquire(blocking=False):
                raise Overloaded(f"{MOST_STREAMS} streams are open already")
            try:
                with self._watch.watching(pool_id):
                    for active in self._changes(pool_id, context):
                        yield protocol.IsActiveResponse(result=active)
            finally:
                self._streams.release()

    def _changes(self, pool_id: str, context: Context) -> Iterator[bool]:
        number, last = 0, None
        while context.is_active() and not self._watch.closed:
            answer = self._watch.after(pool_id, number, LOOK_EVERY_S)
            if answer is None:
                continue
            number = answer.number
            if answer.says is not None and (active := _active(answer.says)) != last:
                last = active
                yield active

    def get_metric_spec(self, ref: Any, context: Context) -> Any:
        """Asks nobody: KEDA must get it also while the orchestrator is away, or it makes an autoscaler of nothing."""
        with _told(context):
            aim = _aim(ref)
            spec = protocol.MetricSpec(
                metricName=aim.metric, targetSize=max(round(aim.target), 1), targetSizeFloat=aim.target
            )
            return protocol.GetMetricSpecResponse(metricSpecs=[spec])

    def get_metrics(self, request: Any, context: Context) -> Any:
        with _told(context):
            aim = _aim(request.scaledObjectRef)
            if request.metricName not in ("", aim.metric):
                raise InvalidInput(f"no metric {request.metricName[:80]!r}; it is {aim.metric}", "metricName")
            found = float(self._watch.ask(aim.pool_id)[aim.metric])
            value = protocol.MetricValue(metricName=aim.metric, metricValue=math.ceil(found), metricValueFloat=found)
            return protocol.GetMetricsResponse(metricValues=[value])


def _aim(ref: Any) -> Aim:
    return Aim.of(ref.scalerMetadata)


def _active(says: Mapping[str, Any]) -> bool:
    """Strictly more than nothing: one job wakes a pool, unless it is paused."""
    return int(says["depth"]) > 0 and not (says.get("paused") and says["desired_workers"] == 0)


@contextmanager
def _told(context: Context) -> Iterator[None]:
    """What goes wrong inside becomes a status of gRPC with a message that helps."""
    try:
        yield
    except OrchestratorError as error:
        context.abort(status_of(error), str(error))  # which raises


def status_of(error: OrchestratorError) -> grpc.StatusCode:
    """Never a code that KEDA could take for "inactive"."""
    if isinstance(error, InvalidInput):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, Overloaded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, Refused) and error.status == 404:
        return grpc.StatusCode.NOT_FOUND
    return grpc.StatusCode.UNAVAILABLE


def handlers(scaler: Scaler) -> grpc.GenericRpcHandler:
    def one(call: Callable[..., Any], asks: Any, answers: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(call, asks.FromString, answers.SerializeToString)

    ref, active = protocol.ScaledObjectRef, protocol.IsActiveResponse
    methods = {
        "IsActive": one(scaler.is_active, ref, active),
        "StreamIsActive": grpc.unary_stream_rpc_method_handler(
            scaler.stream_is_active, ref.FromString, active.SerializeToString
        ),
        "GetMetricSpec": one(scaler.get_metric_spec, ref, protocol.GetMetricSpecResponse),
        "GetMetrics": one(scaler.get_metrics, protocol.GetMetricsRequest, protocol.GetMetricsResponse),
    }
    return grpc.method_handlers_generic_handler(protocol.SERVICE, methods)
