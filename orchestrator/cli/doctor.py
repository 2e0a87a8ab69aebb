"""`gpuorch doctor`: whether everything an installation stands on is there, and set up well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import click

from orchestrator.cli import versions
from orchestrator.cli.options import as_json, with_settings
from orchestrator.cli.output import print_json
from orchestrator.cli.schema import opened, packet_problem
from orchestrator.cli.versions import Version
from orchestrator.config import Loaded
from orchestrator.embedded.directory import CONFIG, beside_holder
from orchestrator.errors import OrchestratorError
from orchestrator.gpu import Gpu, Health, backends
from orchestrator.gpu.watch import Watch
from orchestrator.identity import node_id
from orchestrator.settings import Settings, safe_url
from orchestrator.store import revisions
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_now
from orchestrator.stream import server
from orchestrator.telemetry import tracing

#: Seconds between the database's clock and ours that are worth a word: times in logs and rows then disagree.
CLOCKS_APART_S = 2.0
#: Seconds for the GPU driver. Opening it takes that long where nothing else keeps it open.
GPU_LIMIT_S = 20.0
#: Why nothing answers where a `gpuorch dev` has its data, and no server is named.
DEV_STOPPED = "`gpuorch dev` does not run here: start it, or set ORCH_REDIS_URL"
#: Beside one that runs: it simulates GPUs unless told otherwise, and we look for real ones.
OTHER_GPUS = "by this shell's settings; those of the `gpuorch dev` here: gpuorch gpus"


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
    findings = list(_examined(loaded))
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            click.echo(f"{'✓' if finding.ok else '✗'} {finding.check}: {finding.detail}")
    return 0 if all(finding.ok for finding in findings) else 1


def _examined(loaded: Loaded) -> Iterator[Finding]:
    settings, given = beside_holder(loaded), loaded.settings
    beside_dev = settings.redis_url != given.redis_url
    of_dev = loaded.nobody_gave("database_url", "redis_url") and (given.data_dir / CONFIG).exists()
    for found in examine(settings):
        stopped = of_dev and not beside_dev and found.check == "redis" and not found.ok
        hint = DEV_STOPPED if stopped else OTHER_GPUS if beside_dev and found.check == "gpus" else None
        yield replace(found, detail=f"{found.detail}; {hint}") if hint else found


def examine(settings: Settings) -> Iterator[Finding]:
    yield from _guarded("database", lambda: _of_database(settings))
    yield from _guarded("redis", lambda: _redis(settings))
    yield from _guarded("gpus", lambda: _gpus(settings))
    yield from _guarded("tracing", lambda: _tracing(settings))


def _of_database(settings: Settings) -> Iterator[Finding]:
    with opened(settings) as db:
        for check in (_database, _clock, _schema):
            yield from _guarded(check.__name__.strip("_"), lambda check=check: check(db))  # type: ignore[misc]


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except OrchestratorError as error:
        yield Finding(name, ok=False, detail=str(error))


def _database(db: Database) -> Iterator[Finding]:
    found = versions.of_database(db)
    # An old one may refuse whatever else is asked of it.
    more = f", {db.write(lambda conn: conn.get_isolation_level())}" if found.new_enough else _needs(found)
    obstacle = db.obstacle() if found.new_enough else None
    detail = f"{safe_url(db.settings.database_url)}, version {found.text}{more}{f'; {obstacle}' if obstacle else ''}"
    yield Finding("database", found.new_enough and obstacle is None, detail)
    if found.new_enough and (most := db.largest_statement()):
        problem = packet_problem(db)
        yield Finding("max-allowed-packet", problem is None, problem or f"{most} bytes")


def _clock(db: Database) -> Iterator[Finding]:
    before = datetime.now(UTC)
    theirs = db.read(lambda conn: conn.scalar(utc_now().select())).replace(tzinfo=UTC)
    after = datetime.now(UTC)
    # Whatever passed while we asked is not a difference.
    apart = max((before - theirs).total_seconds(), (theirs - after).total_seconds(), 0.0)
    yield Finding("clock", apart < CLOCKS_APART_S, f"{apart:.3f} s apart from the database's, which counts")


def _schema(db: Database) -> Iterator[Finding]:
    pending = revisions.pending(db)
    hint = f", this version needs {revisions.head()}; run: gpuorch migrate" if pending else ""
    yield Finding("schema", not pending, f"revision {revisions.current(db) or 'none'}{hint}")


def _redis(settings: Settings) -> Iterator[Finding]:
    found = server.describe(settings)
    version = Version(found.kind, found.version)
    detail = f"{safe_url(settings.redis_url)}, {found.kind} {found.version}{_needs(version)}"
    yield Finding("redis", version.new_enough, detail)
    safe = found.maxmemory_policy == "noeviction"
    hint = "" if safe else "; set it to noeviction, or streams may be evicted"
    yield Finding("maxmemory-policy", safe, found.maxmemory_policy + hint)
    # Not a fault: what a restart loses of jobs is published again from the database.
    lost = "a restart of Redis delays jobs, and loses events of ingest_events that are no jobs yet"
    kept = "yes" if found.appendonly else f"no; {lost}"
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


def _needs(version: Version) -> str:
    return "" if version.new_enough else f"; needs {version.needed}"
