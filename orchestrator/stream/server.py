"""The server behind the streams: which one it is, and how it is set up."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from orchestrator.settings import Settings
from orchestrator.stream.client import connect, named_errors


@dataclass(frozen=True)
class Server:
    kind: str
    version: str
    maxmemory_policy: str
    appendonly: bool


def describe(settings: Settings) -> Server:
    """Raises RedisUnavailable, also when it keeps its configuration to itself."""
    with connect(settings) as client, named_errors(settings, client):
        found = _version(client)
        values = client.config_get("maxmemory-policy", "appendonly")
    configured = {_text(key): _text(value) for key, value in values.items()}
    return Server(*found, configured.get("maxmemory-policy", "unknown"), configured.get("appendonly") == "yes")


def version(settings: Settings) -> tuple[str, str]:
    """`redis` or `valkey`, and its version. Raises RedisUnavailable, also when it keeps that to itself."""
    with connect(settings) as client, named_errors(settings, client):
        return _version(client)


def _version(client: redis.Redis) -> tuple[str, str]:
    info = client.info("server")
    kind = "valkey" if "valkey_version" in info else "redis"
    return kind, str(info.get(f"{kind}_version", "unknown"))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
