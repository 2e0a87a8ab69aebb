"""Connections to Redis, and the one place where its errors get our names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.driver_info import DriverInfo
from redis.retry import Retry

from orchestrator.errors import RedisUnavailable
from orchestrator.settings import Settings, safe_url

#: What a connection tells of its library; without it each would read the package's metadata anew.
DRIVER = DriverInfo()


def connect(settings: Settings, greet: Callable[[AbstractConnection], None] | None = None) -> redis.Redis:
    """A client that never retries by itself; `greet` is called with each new connection, instead of `on_connect`.

    A command whose answer got lost may have been done: repeating an XADD would announce a job twice, repeating an
    XREADGROUP would strand the entries of the first answer. Callers know what may be repeated; the client does not.

    Nor does it ask whether a connection lives (health_check_interval) before a command. That PING could only fail as
    the command does: after the same `socket_timeout`, without another try. It says nothing of a read that waits; that
    one ends by itself, since it waits for less than the timeout. Where nobody asks, the kernel does (keepalive).
    """
    local = settings.redis_url.startswith("unix://")  # such a socket knows no keepalive, and needs none
    return redis.Redis.from_url(
        settings.redis_url,
        **({} if local else {"socket_keepalive": True}),
        socket_timeout=settings.redis_timeout_s,
        socket_connect_timeout=settings.redis_timeout_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        redis_connect_func=greet,
        driver_info=DRIVER,
        protocol=2,
    )


@contextmanager
def named_errors(settings: Settings, client: redis.Redis) -> Iterator[None]:
    """Turn what redis raises into RedisUnavailable, so that callers need not know the library."""
    try:
        yield
    except redis.RedisError as error:
        if isinstance(error, redis.exceptions.ReadOnlyError):
            # The primary was demoted. Its name may lead to the new one by now; these connections never will.
            client.connection_pool.disconnect(inuse_connections=False)
        message = f"{safe_url(settings.redis_url)}: {error}"
        raise RedisUnavailable(message, answered=isinstance(error, redis.ResponseError)) from error
