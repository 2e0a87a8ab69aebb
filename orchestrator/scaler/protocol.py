"""KEDA's protocol: package `externalscaler`, service `ExternalScaler`. Described here, compiled when it is imported.

| call | asks | answers |
|---|---|---|
| IsActive | ScaledObjectRef | IsActiveResponse: whether there should be any worker |
| StreamIsActive | ScaledObjectRef | the same again and again, at every change |
| GetMetricSpec | ScaledObjectRef | GetMetricSpecResponse: the metric, and how much of it one worker takes |
| GetMetrics | GetMetricsRequest | GetMetricsResponse: how much of it there is |

The numbers of the fields are KEDA's and stay. Integers are for versions before the fields with fractions.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "externalscaler"
SERVICE = f"{PACKAGE}.ExternalScaler"

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int64": _Field.TYPE_INT64,
    "double": _Field.TYPE_DOUBLE,
}
#: Message → its fields in order of their numbers, from 1; a * stands for repeated, others are messages by name.
_MESSAGES = {
    "ScaledObjectRef": ("name string", "namespace string", "scalerMetadata *ScaledObjectRef.ScalerMetadataEntry"),
    "IsActiveResponse": ("result bool",),
    "MetricSpec": ("metricName string", "targetSize int64", "targetSizeFloat double"),
    "GetMetricSpecResponse": ("metricSpecs *MetricSpec",),
    "GetMetricsRequest": ("scaledObjectRef ScaledObjectRef", "metricName string"),
    "MetricValue": ("metricName string", "metricValue int64", "metricValueFloat double"),
    "GetMetricsResponse": ("metricValues *MetricValue",),
}
#: What a map of texts is on the wire: a list of pairs, marked as one.
_PAIR = ("key string", "value string")


def _field(number: int, text: str) -> descriptor_pb2.FieldDescriptorProto:
    name, kind = text.split()
    label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
    kind = kind.lstrip("*")
    if kind in _SCALARS:
        return _Field(name=name, number=number, label=label, type=_SCALARS[kind])
    return _Field(name=name, number=number, label=label, type=_Field.TYPE_MESSAGE, type_name=f".{PACKAGE}.{kind}")


def _message(name: str, fields: tuple[str, ...]) -> descriptor_pb2.DescriptorProto:
    return descriptor_pb2.DescriptorProto(name=name, field=[_field(n, text) for n, text in enumerate(fields, 1)])


def _file() -> descriptor_pb2.FileDescriptorProto:
    messages = [_message(name, fields) for name, fields in _MESSAGES.items()]
    pair = messages[0].nested_type.add()
    pair.CopyFrom(_message("ScalerMetadataEntry", _PAIR))
    pair.options.map_entry = True
    return descriptor_pb2.FileDescriptorProto(
        name="externalscaler.proto", package=PACKAGE, syntax="proto3", message_type=messages
    )


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ScaledObjectRef = _class("ScaledObjectRef")
IsActiveResponse = _class("IsActiveResponse")
MetricSpec = _class("MetricSpec")
GetMetricSpecResponse = _class("GetMetricSpecResponse")
GetMetricsRequest = _class("GetMetricsRequest")
MetricValue = _class("MetricValue")
GetMetricsResponse = _class("GetMetricsResponse")
