"""One run from the first server to the verdict."""

import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from orchestrator.settings import Settings
from orchestrator.store import schema
from orchestrator.store.database import Database
from tests.chaos.leases.cards import Node, SoleDriver, uuids_of
from tests.chaos.leases.checker import check
from tests.chaos.leases.clients import Budget, Client, Process, Server
from tests.chaos.leases.history import History, Violation
from tests.chaos.leases.weather import Faults, Operator, Repeated, Strangers
from tests.chaos.sites import ROOT, SHORT_TIMES
from tests.cluster import Member
from tests.gpu.driver import build
from tests.servers import MariaDB, Redis
from tests.tables import make_tables
from tests.waiting import wait_until

NODES, CARDS = 2, 4
#: Of 64 clients, how many share a process with another, and how many tell none.
TWINS, NAMELESS = 16, 8
STRANGERS = 6
#: Seconds in which everything must be given back after the last client left.
TIDY_S = 60.0
TIMES: dict[str, Any] = SHORT_TIMES | {
    "gpu_gate_hold_s": 0.5,
    "gpu_release_s": 4.0,
    "gpu_stale_s": 2.0,
    # A busy machine is no dead database, for whose answers clients have more time than this, and no dead worker.
    "db_timeout_s": 20.0,
    "worker_timeout_s": 30.0,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    operations: int = 20_000
    clients: int = 64
    orchestrators: int = 1
    #: Seconds between two faults of a node, at most.
    calm_s: float = 6.0
    build: Path = ROOT


@dataclass(frozen=True)
class Report:
    plan: Plan
    history: History
    violations: list[Violation]
    figures: dict[str, Any]


def run(plan: Plan, tell: Callable[[str], None] = lambda _text: None, folder: Path | None = None) -> Report:
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-leases-")))
        folder.mkdir(parents=True, exist_ok=True)
        mariadb, redis = stack.enter_context(MariaDB()), stack.enter_context(Redis())
        settings = Settings(
            database_url=mariadb.url,
            redis_url=redis.url,
            data_dir=folder,
            gpu_backend="nvml",
            worker_slots=1,
            **TIMES,
        )
        db = Database(settings)
        stack.callback(db.close)
        make_tables(db.engine)
        history = History()
        nodes = _nodes(folder, history, settings)
        urls = _start(plan, settings, nodes, stack)
        _wait_for_cards(db)
        tell(f"{len(urls)} orchestrators, {len(nodes)} nodes of {CARDS} cards; seed {plan.seed}")
        return _stress(plan, db, nodes, urls, history, tell)


def _nodes(folder: Path, history: History, settings: Settings) -> list[Node]:
    library = build(folder)
    return [
        Node(
            f"node-{number}",
            SoleDriver(folder / f"cards-{number}", library),
            uuids_of(number, CARDS),
            history,
            settings.gpu_stale_s,
        )
        for number in range(NODES)
    ]


def _start(plan: Plan, settings: Settings, nodes: Sequence[Node], stack: ExitStack) -> list[str]:
    """All at once: most of the time that it takes is the loading of modules."""

    def start(name: str, command: str, environment: dict[str, str], **given: Any) -> Member:
        member = Member(
            command,
            settings.model_copy(update=given),
            settings.data_dir / f"{name}.log",
            path=str(ROOT),
            build=plan.build,
            environment=environment,
            forked=True,
        )
        stack.callback(member.kill)
        return member

    workers = [start(node.node_id, "worker", node.driver.environment(), node_id=node.node_id) for node in nodes]
    servers = [start(f"serve-{number}", "serve", {}, port=0) for number in range(plan.orchestrators)]
    for worker in workers:
        worker.says("worker ready", 60)
    return [server.says(r"gpuorch serves (\S+)", 60)[1] for server in servers]


def _wait_for_cards(db: Database) -> None:
    seen = select(func.count()).select_from(schema.gpus).where(schema.gpus.c.health == "ok")
    wait_until(
        lambda: db.read(lambda conn: conn.execute(seen).scalar_one()) == NODES * CARDS,
        timeout=60,
        what="all cards seen",
    )


@contextmanager
def _processes() -> Iterator[Callable[[], Process]]:
    """Processes that only live, until the end of the run."""
    children: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen(["sleep", "86400"], stdin=subprocess.DEVNULL))
        return children[-1]

    try:
        yield lambda: Process(start)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def _stress(
    plan: Plan, db: Database, nodes: Sequence[Node], urls: Sequence[str], history: History, tell: Callable[[str], None]
) -> Report:
    budget = Budget(plan.operations)
    with _processes() as process:
        clients = _clients(plan, nodes, urls, history, budget, process)
        strangers = [
            Strangers(node, [process() for _ in range(STRANGERS)], history, _random(plan, "strangers", node.node_id))
            for node in nodes
        ]
        faults = [Faults(node, db, history, _random(plan, "faults", node.node_id), plan.calm_s) for node in nodes]
        operator = Operator(db, history, _random(plan, "operator"))
        weather = [*(one.thread for one in strangers), *(one.thread for one in faults)]
        began = time.monotonic()
        for thread in (*clients, *weather, operator.thread):
            thread.start()
        _wait(clients, budget, history, tell)
        took_s = time.monotonic() - began
        for thread in weather:
            thread.stopping.set()
        for thread in weather:
            thread.join(60)
        for group in strangers:
            group.leave()
        _tidy(db, operator, history)
        operator.thread.stopping.set()
        operator.thread.join(60)
    ran: list[Client | Repeated] = [*clients, *weather, operator.thread]
    for one in ran:
        if one.error is not None:
            history.incident("broken", f"{one.name}: {one.error!r}")
    return Report(plan, history, check(history), _figures(plan, history, nodes, operator, took_s))


def _clients(
    plan: Plan,
    nodes: Sequence[Node],
    urls: Sequence[str],
    history: History,
    budget: Budget,
    process: Callable[[], Process],
) -> list[Client]:
    """Twins share a process and so a node; the nameless are all on the last one."""
    twins, nameless = plan.clients * TWINS // 64 // 4 * 4, plan.clients * NAMELESS // 64
    shared = [process() for _ in range(twins // 2)]
    clients = []
    for number in range(plan.clients):
        node, mine = nodes[number % NODES], None
        if number < twins:
            mine = shared[number % len(shared)]
        elif number < twins + nameless:
            node = nodes[-1]
        else:
            mine = process()
        clients.append(
            Client(
                number,
                node,
                Server(urls[number % len(urls)]),
                history,
                budget,
                _random(plan, "client", number),
                mine,
                sole=number >= twins + nameless,
                release_s=TIMES["gpu_release_s"],
            )
        )
    return clients


def _random(plan: Plan, *name: object) -> random.Random:
    return random.Random(" ".join(map(str, (plan.seed, *name))))


def _wait(clients: Sequence[Client], budget: Budget, history: History, tell: Callable[[str], None]) -> None:
    told = time.monotonic()
    while any(client.is_alive() for client in clients):
        time.sleep(0.1)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            faults = sum(count for name, count in history.counts.items() if name.startswith("fault"))
            tell(
                f"{told - history.began:6.0f} s  {budget.left:6d} operations left"
                f"  {history.counts['granted']:6d} grants  {faults:4d} faults  {len(history.incidents)} incidents"
            )


def _tidy(db: Database, operator: Operator, history: History) -> None:
    """Everybody has left: nothing is leased, used or closed any more."""
    gpus, leases = schema.gpus, schema.leases
    active = select(func.count()).select_from(leases).where(leases.c.state == "active")
    odd = odd_cards(gpus)

    def state() -> tuple[int, list[Any]]:
        left = db.read(lambda conn: conn.execute(active).scalar_one())
        return int(left), list(db.read(lambda conn: conn.execute(odd).all()))

    try:
        wait_until(lambda: state() == (0, []), timeout=TIDY_S)
    except AssertionError:
        left, cards = state()
        history.incident("INV-17", f"{TIDY_S:g} s after the last client left: {left} leases are active, {cards}")
    operator.look()


def odd_cards(gpus: Any) -> Any:
    """Cards that are not as they were at the beginning."""
    odd = (
        (gpus.c.leased_mb != 0)
        | (gpus.c.foreign_mb != 0)
        | (gpus.c.used_mb != 0)
        | (gpus.c.health != "ok")
        | gpus.c.quarantined_at.is_not(None)
        | gpus.c.gate_closed_at.is_not(None)
    )
    return select(gpus.c.gpu_uuid, gpus.c.leased_mb, gpus.c.foreign_mb, gpus.c.used_mb, gpus.c.health).where(odd)


def _figures(plan: Plan, history: History, nodes: Sequence[Node], operator: Operator, took_s: float) -> dict[str, Any]:
    cards = [card for node in nodes for card in node.cards.values()]
    return {
        "operations": plan.operations,
        "seconds": round(took_s, 1),
        "operations_per_s": round(plan.operations / took_s),
        "looks_at_accounts": operator.looks,
        "fullest_card_pct": round(100 * max(card.most_used_mb / card.total_mb for card in cards)),
        **dict(sorted(history.counts.items())),
    }
