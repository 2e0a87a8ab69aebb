"""`make bench`: our speed beside what the machine can do, measured in one run, interleaved, as ratios.

python -m tests.bench [--jobs 10000] [--leases 4096] [--submits 50000] [--rounds 3] [--slots 16] [--json]
                      [--only jobs|leases|heartbeats|batching|pools|flood|caps|publish|shares|map|import|scrape]
                      [--parts 100000]

`shares`, `map`, `import` and `scrape` are run only when asked for: they take minutes. They exit with 1 when an agent
does not get its share; when a map of so many parts, whose workers are killed meanwhile, is not exactly what it should
be; when a file that was imported, interrupted and imported again (`--jobs`, by default 100,000 lines) did not become
exactly its jobs, or the importer's memory grows; when scrapes with a million jobs waiting take longer than promised.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from orchestrator.settings import Settings
from tests.bench import caps, importing, raw
from tests.bench.flood import COUNT, Flood
from tests.bench.heartbeats import Beating
from tests.bench.leases import Leases
from tests.bench.mapping import Mapping, wrong_with
from tests.bench.ours import Ours
from tests.bench.publish import BACKLOGS, TAKEN, Publishing
from tests.bench.scrape import BACKLOGS as SCRAPED
from tests.bench.scrape import PROMISED_S, Scrape
from tests.bench.shares import LATE_WINDOWS, TOLERANCE, WANTED, WINDOW, Shares
from tests.bench.trial import Trial
from tests.bench.warmth import LOAD_S, Warmth
from tests.servers import MariaDB, Redis

#: Lease grants to a transaction.
BATCHES = {64: "batches of 64", 1: "one by one"}
#: Jobs under caps, and how long each of them takes.
CAPPED_JOBS, CAPPED_S = 200, 0.5
#: What a call of the handlers costs, however many jobs it is for.
COSTS = {"free": "free calls", "2ms": "2 ms a call"}


def main() -> None:
    options = _options()
    figures: dict[str, list[float]] = defaultdict(list)
    with MariaDB() as mariadb, Redis() as redis:
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds} …", file=sys.stderr, flush=True)
            for part, measure in PARTS.items():
                if options.only == part or (options.only is None and part not in ON_DEMAND):
                    measure(mariadb, redis, options, figures)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    _report(medians, figures, options)
    if figures.get("shares missed") or figures.get("map is wrong") or figures.get("scrapes are slow"):
        sys.exit(1)


def _round(mariadb: MariaDB, redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    url, count, slots = mariadb.create_database("bench"), options.jobs, options.slots
    figures["raw SQL cycle, batches of 100"].append(count / raw.cycle(url, count))
    trial = Trial(url, redis.url)
    figures["trial: submit"].append(count / trial.submit(count))
    figures["trial: drain"].append(count / trial.drain(count, slots))
    for label, fields in (("", {}), (" with leases", {"min_memory_mb": 100})):
        redis.flush()
        with tempfile.TemporaryDirectory() as folder:
            ours = Ours(url, redis.url, Path(folder), slots)
            validated, stored = ours.submit(count, **fields)
            figures[f"ours: validate{label}"].append(count / validated)
            figures[f"ours: submit{label}"].append(count / stored)
            rate, commits = ours.drain(count)
            figures[f"ours: drain{label}"].append(rate)
            figures[f"commits per job{label}"].append(commits)
            ours.close()


def _batching(mariadb: MariaDB, redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    """The same jobs on the same slots, one to a call and many to a call."""
    for cost, label in COSTS.items():
        for way in ("plain", "batched"):
            redis.flush()
            with tempfile.TemporaryDirectory() as folder:
                url = mariadb.create_database("bench_batching")
                ours = Ours(url, redis.url, Path(folder), options.slots, "tests.bench.batch_handlers")
                ours.submit(options.jobs, type=f"{way}-{cost}")
                figures[f"{way}: drain, {label}"].append(ours.drain(options.jobs)[0])
                if mean := ours.mean_batch(f"{way}-{cost}"):
                    figures[f"mean batch, {label}"].append(mean)
                ours.close()


def _grants(mariadb: MariaDB, _redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    """As many to a transaction as 64 callers wait for at a time, and one by one."""
    leases = Leases(mariadb.create_database("bench_leases"))
    try:
        for batch, label in BATCHES.items():
            count = options.leases if batch > 1 else options.leases // 8
            for who, rate in leases.race(count, batch).items():
                figures[f"{who}: lease grants, {label}"].append(rate)
    finally:
        leases.close()


def _heartbeats(mariadb: MariaDB, _redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    beating = Beating(mariadb.create_database("bench_heartbeats"))
    try:
        for way, (rate, commits) in beating.race(options.leases).items():
            figures[f"{way}: lease heartbeats"].append(rate)
            figures[f"{way}: commits per heartbeat"].append(commits)
    finally:
        beating.close()


def _pools(mariadb: MariaDB, redis: Redis, _options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    redis.flush()
    with tempfile.TemporaryDirectory() as folder:
        warmth = Warmth(mariadb.create_database("bench_pools"), redis.url, Path(folder))
        try:
            for before, seconds in warmth.measure().items():
                figures[f"{before}: ms to a result, load {LOAD_S * 1000:g}"] += [1000 * one for one in seconds]
        finally:
            warmth.close()


def _flood(mariadb: MariaDB, redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    redis.flush()
    with tempfile.TemporaryDirectory() as folder:
        flood = Flood(mariadb.create_database("bench_flood"), redis.url, Path(folder))
        try:
            for what, value in flood.measure(options.submits).items():
                figures[f"flood: {what}"].append(value)
        finally:
            flood.close()


def _publish(mariadb: MariaDB, _redis: Redis, _options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    publishing = Publishing(mariadb.create_database("bench_publish"))
    try:
        publishing.prepare()
        for count, seconds in publishing.race():
            figures[f"publish {TAKEN} of {count:,}: ms"].append(1000 * seconds)
    finally:
        publishing.close()


def _shares(mariadb: MariaDB, redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    redis.flush()
    with tempfile.TemporaryDirectory() as folder:
        shares = Shares(mariadb.create_database("bench_shares"), redis.url, Path(folder), options.slots)
        try:
            found, late = shares.measure(options.jobs)
        finally:
            shares.close()
    figures[f"share in windows of {WINDOW}, of {WANTED:g}"] += found
    figures["windows until a late job starts"].append(late)
    if late > LATE_WINDOWS or max(abs(share - WANTED) for share in found) > TOLERANCE * WANTED:
        print("an agent does not get its share, or comes too late", file=sys.stderr)
        figures["shares missed"].append(1)


def _caps(mariadb: MariaDB, redis: Redis, _options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    """200 jobs on 8 slots, two at a time for an agent and one for a host; and as many that only the slots limit."""
    best = caps.least_seconds(CAPPED_JOBS, CAPPED_S)
    for label, limits in (("no caps", {}), ("caps", caps.CAPS)):
        redis.flush()
        with tempfile.TemporaryDirectory() as folder:
            url = mariadb.create_database("bench_caps")
            settings = Settings(database_url=url, redis_url=redis.url, data_dir=Path(folder), gpu_backend="none")
            capped = caps.Capped(settings, Path(folder), limits)
            try:
                capped.run(CAPPED_JOBS, CAPPED_S, timeout_s=300)
                figures[f"{label}: seconds ÷ least"].append(caps.seconds_taken(capped.ledger) / best)
                most = caps.most_at_once(capped.ledger)
                for kind in limits:
                    seen = max(count for key, count in most.items() if key.startswith(kind))
                    figures[f"caps: most at once, {kind} (of {caps.CAPS[kind]})"].append(seen)
            finally:
                capped.close()


def _map(mariadb: MariaDB, redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    redis.flush()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/map.db" if options.sqlite else mariadb.create_database("bench_map")
        mapping = Mapping(url, redis.url, Path(folder), options.slots)
        try:
            found = mapping.run(options.parts)
            wrong = wrong_with(found, options.parts, mapping.peaks)
        finally:
            mapping.close()
    figures[f"map of {options.parts:,} parts: seconds"].append(found["seconds"])
    figures["map: parts a second"].append(options.parts / found["seconds"])
    figures["map: workers killed"].append(mapping.kills)
    figures["map: runs of the task that collects"].append(found["runs"])
    for kind, mib in sorted(mapping.peaks.mib.items()):
        figures[f"peak MiB, {kind}"].append(mib)
    for told in wrong:
        print(told, file=sys.stderr)
        figures["map is wrong"].append(1)


def _import(mariadb: MariaDB, redis: Redis, options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    redis.flush()
    with tempfile.TemporaryDirectory() as folder:
        measured = importing.Import(mariadb.create_database("bench_import"), redis.url, Path(folder))
        try:
            for what, value in measured.measure(options.jobs).items():
                figures[f"import: {what}"].append(value)
        finally:
            measured.close()


def _scrape(mariadb: MariaDB, redis: Redis, _options: argparse.Namespace, figures: dict[str, list[float]]) -> None:
    redis.flush()
    with tempfile.TemporaryDirectory() as folder:
        scrape = Scrape(mariadb.create_database("bench_scrape"), redis.url, Path(folder))
        try:
            found = scrape.measure()
        finally:
            scrape.close()
    for what, value in found.items():
        figures[f"scrape, {what}"].append(value)
    slowest = max(value for what, value in found.items() if what.endswith("pending: p99 ms"))
    promised = 1000 * PROMISED_S
    verdict = "less" if slowest < promised else "MORE"
    print(f"p99 of a scrape: {slowest:.1f} ms, {verdict} than {promised:g} ms", file=sys.stderr)
    if slowest >= promised:
        figures["scrapes are slow"].append(1)


PARTS = {
    "leases": _grants,
    "heartbeats": _heartbeats,
    "jobs": _round,
    "batching": _batching,
    "pools": _pools,
    "flood": _flood,
    "caps": _caps,
    "publish": _publish,
    "shares": _shares,
    "map": _map,
    "import": _import,
    "scrape": _scrape,
}
ON_DEMAND = {"shares", "map", "import", "scrape"}


def _report(medians: dict[str, float], figures: dict[str, list[float]], options: argparse.Namespace) -> None:
    ratios: dict[str, float] = {}
    if "ours: drain" in medians:
        whole = 1 / (1 / medians["ours: submit"] + 1 / medians["ours: drain"])
        ratios |= {
            "ours: drain ÷ trial: drain": medians["ours: drain"] / medians["trial: drain"],
            "ours: submit ÷ trial: submit": medians["ours: submit"] / medians["trial: submit"],
            "ours: whole run ÷ raw SQL cycle": whole / medians["raw SQL cycle, batches of 100"],
        }
    for label in COSTS.values() if options.only in (None, "batching") else ():
        ratios[f"{label}: batched ÷ plain"] = medians[f"batched: drain, {label}"] / medians[f"plain: drain, {label}"]
    if options.only in (None, "publish"):
        few, many = (medians[f"publish {TAKEN} of {count:,}: ms"] for count in BACKLOGS)
        ratios["publish: a million waiting ÷ a thousand"] = many / few
    for part in ("p50", "p99") if options.only == "scrape" else ():
        few, many = (medians[f"scrape, {count:,} pending: {part} ms"] for count in SCRAPED)
        ratios[f"scrape, {part}: a million waiting ÷ a thousand"] = many / few
    for label in BATCHES.values() if options.only in (None, "leases") else ():
        ratio = medians[f"ours: lease grants, {label}"] / medians[f"raw: lease grants, {label}"]
        ratios[f"lease grants, {label}: ours ÷ raw"] = ratio
    if options.only in (None, "heartbeats"):
        ratio = medians["batched: lease heartbeats"] / medians["one by one: lease heartbeats"]
        ratios["lease heartbeats: batched ÷ one by one"] = ratio
    if options.json:
        print(json.dumps({"per_second": figures, "medians": medians, "ratios": ratios}, indent=1))
        return
    print(f"{options.jobs} echo jobs, {options.slots} slots, {options.leases} leases, {options.rounds} rounds")
    print("jobs or leases per second, or what is said; median [range]")
    for name, values in figures.items():
        print(f"  {name:42s} {medians[name]:10,.2f}   [{min(values):,.2f} … {max(values):,.2f}]")
    for name, ratio in ratios.items():
        print(f"  {name:42s} {ratio:10.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--jobs", type=int, help="10,000 unless said; of an import 100,000")
    parser.add_argument("--leases", type=int, default=4096)
    parser.add_argument("--submits", type=int, default=COUNT)
    parser.add_argument("--parts", type=int, default=100_000)
    parser.add_argument("--sqlite", action="store_true", help="the map on SQLite")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.jobs = options.jobs or (importing.COUNT if options.only == "import" else 10_000)
    return options


if __name__ == "__main__":
    main()
