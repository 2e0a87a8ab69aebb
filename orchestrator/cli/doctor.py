"""`gpuorch doctor`: whether everything an installation stands on is there, and set up well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

import click

from orchestrator.cli.options import as_json, with_settings
from orchestrator.cli.output import print_json
from orchestrator.cli.schema import opened
from orchestrator.config import Loaded
from orchestrator.errors import OrchestratorError
from orchestrator.gpu import Gpu, Health, backends
from orchestrator.gpu.watch import Watch
from orchestrator.identity import node_id
from orchestrator.settings import Settings, safe_url
from orchestrator.store import migrate
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_now
from orchestrator.stream import server
from orchestrator.telemetry import tracing

#: Oldest versions that everything here is tested with.
OLDEST_DATABASE = {"mysql": (10, 6), "sqlite": (3, 35)}
OLDEST_REDIS = (7, 0)
#: Seconds between the database's clock and ours that are worth a word: times in logs and rows then disagree.
CLOCKS_APART_S = 2.0
#: Seconds for the GPU driver. Opening it takes that long where nothing else keeps it open.
GPU_LIMIT_S = 20.0


@dataclass(frozen=True)
class Finding:
    check: str
    ok: bool
    detail: str


@click.command()
@with_settings("database_url", "redis_url", "gpu_backend")
@as_json
def doctor(loaded: Loaded, *, as_json: bool) -> int:
    """Check the database, Redis, the schema and the GPUs; exit 1 when anything is broken."""
    findings = list(examine(loaded.settings))
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            click.echo(f"{'✓' if finding.ok else '✗'} {finding.check}: {finding.detail}")
    return 0 if all(finding.ok for finding in findings) else 1


def examine(settings: Settings) -> Iterator[Finding]:
    with opened(settings) as db:
        for check in (_database, _clock, _schema):
            yield from _guarded(check.__name__.strip("_"), lambda check=check: check(db))  # type: ignore[misc]
    yield from _guarded("redis", lambda: _redis(settings))
    yield from _guarded("gpus", lambda: _gpus(settings))
    yield from _guarded("tracing", lambda: _tracing(settings))


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except OrchestratorError as error:
        yield Finding(name, ok=False, detail=str(error))


def _database(db: Database) -> Iterator[Finding]:
    name, version, isolation = db.write(
        lambda conn: (conn.dialect.name, conn.dialect.server_version_info, conn.get_isolation_level())
    )
    numbers = tuple(part for part in version or () if isinstance(part, int))
    oldest = OLDEST_DATABASE[name]
    detail = f"{safe_url(db.settings.database_url)}, version {_dotted(numbers)}, {isolation}"
    new_enough = numbers >= oldest
    yield Finding("database", new_enough, detail + ("" if new_enough else f"; needs {_dotted(oldest)} or later"))


def _clock(db: Database) -> Iterator[Finding]:
    before = datetime.now(UTC)
    theirs = db.read(lambda conn: conn.scalar(utc_now().select())).replace(tzinfo=UTC)
    after = datetime.now(UTC)
    # Whatever passed while we asked is not a difference.
    apart = max((before - theirs).total_seconds(), (theirs - after).total_seconds(), 0.0)
    yield Finding("clock", apart < CLOCKS_APART_S, f"{apart:.3f} s apart from the database's, which counts")


def _schema(db: Database) -> Iterator[Finding]:
    current, head = migrate.current_revision(db), migrate.head_revision()
    pending = migrate.pending(db)
    hint = f", this version needs {head}; run: gpuorch migrate" if pending else ""
    yield Finding("schema", not pending, f"revision {current or 'none'}{hint}")


def _redis(settings: Settings) -> Iterator[Finding]:
    found = server.describe(settings)
    new_enough = tuple(int(part) for part in found.version.split(".")[:2]) >= OLDEST_REDIS
    hint = "" if new_enough else f"; needs {_dotted(OLDEST_REDIS)} or later"
    yield Finding("redis", new_enough, f"{safe_url(settings.redis_url)}, {found.kind} {found.version}{hint}")
    safe = found.maxmemory_policy == "noeviction"
    hint = "" if safe else "; set it to noeviction, or streams may be evicted"
    yield Finding("maxmemory-policy", safe, found.maxmemory_policy + hint)
    # Not a fault: what a restart loses is published again from the database.
    kept = "yes" if found.appendonly else "no; a restart of Redis delays jobs, loses none"
    yield Finding("appendonly", ok=True, detail=kept)


def _gpus(settings: Settings) -> Iterator[Finding]:
    watch = Watch(backends.choose(settings.gpu_backend, node_id(settings), settings.data_dir), GPU_LIMIT_S)
    with closing(watch):
        gpus = watch.sample()
        yield Finding("gpus", ok=True, detail=f"{settings.gpu_backend}: {watch.about()}; this node has {len(gpus)}")
    yield from map(_gpu, gpus)


def _tracing(settings: Settings) -> Iterator[Finding]:
    """Nothing, where nobody wants it."""
    if endpoint := settings.otlp_endpoint:
        answers = tracing.answers(endpoint)
        yield Finding("tracing", answers, f"{endpoint} {'takes spans' if answers else 'does not take spans'}")


def _gpu(gpu: Gpu) -> Finding:
    state = f"{gpu.health}: {gpu.health_reason}" if gpu.health_reason else gpu.health
    detail = f"{gpu.uuid}, {gpu.name}, {gpu.free_mb} of {gpu.total_mb} MB free, {state}"
    return Finding(f"gpu {gpu.index}", gpu.health is Health.OK, detail)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
