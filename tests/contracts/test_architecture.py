"""The rules that keep the layout honest, read from the source by `ast`; each is shown to be able to fail."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import pytest
from sqlalchemy import create_engine, update

from orchestrator import errors
from orchestrator.store import schema
from orchestrator.store.hot import Hot

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for top in ("orchestrator", "worker", "sql") for path in (ROOT / top).rglob("*.py"))
MODULES = {path.relative_to(ROOT).as_posix(): path for path in SOURCES}

#: library → where it may be imported
DOORS = {
    "sqlalchemy": ("orchestrator/store/", "sql/"),
    "alembic": ("orchestrator/store/", "sql/"),
    "pymysql": ("orchestrator/store/", "sql/"),
    "redis": ("orchestrator/stream/",),
    "fastapi": ("orchestrator/api/",),
    "starlette": ("orchestrator/api/",),
    "pynvml": ("orchestrator/gpu/nvml.py",),
    "httpx": ("orchestrator/client/",),
    "click": ("orchestrator/cli/",),
    "grpc": ("orchestrator/scaler/",),
    "google": ("orchestrator/scaler/",),
    "prometheus_client": ("orchestrator/telemetry/",),
    "opentelemetry": ("orchestrator/telemetry/",),
    "worker": ("worker/", "orchestrator/cli/"),
}
#: Files that must know which database they talk to.
DIALECT_FILES = (
    "orchestrator/store/dialect/",
    "orchestrator/settings.py",
    "orchestrator/setting_values.py",
    "orchestrator/cli/",
    "sql/",
)
DIALECT_WORD = re.compile(r"mysql|mariadb|sqlite|pymysql|paramstyle|driver_connection", re.IGNORECASE)
#: Where names and texts stand in the tree.
SPOKEN: dict[type[ast.AST], str] = {
    ast.Constant: "value",
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.keyword: "arg",
    ast.alias: "name",
}


@lru_cache(maxsize=1)
def nodes(tree: ast.AST) -> list[ast.AST]:
    """As ast.walk, once for all rules about a module."""
    return list(ast.walk(tree))


def dotted(name: ast.expr) -> str:
    """`a.b` as it is written; "" for what is no name, as in `.b`."""
    if isinstance(name, ast.Attribute):
        return f"{dotted(name.value)}.{name.attr}"
    return name.id if isinstance(name, ast.Name) else ""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Top-level names of what a module imports when it runs; imports for type checkers do not run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]
        yield from imports(node)


def closed_doors(name: str, tree: ast.AST) -> list[str]:
    return [
        f"{name}:{line} imports {library}"
        for line, library in imports(tree)
        if library in DOORS and not name.startswith(DOORS[library])
    ]


#: layer → what it must not import: nobody looks up, and decisions know no servers
ABOVE = {
    "worker/": ("orchestrator.leader", "orchestrator.daemon", "orchestrator.api", "orchestrator.cli"),
    "orchestrator/store/": ("orchestrator.stream", "orchestrator.leader", "orchestrator.daemon", "orchestrator.api"),
    "orchestrator/stream/": ("orchestrator.store", "orchestrator.leader", "orchestrator.daemon", "orchestrator.api"),
    # Other programs import it: it needs no server of ours, and drags none of their libraries in.
    "orchestrator/client/": tuple(
        f"orchestrator.{above}" for above in ("api", "cli", "daemon", "gpu", "leader", "publisher", "store", "stream")
    ),
    "orchestrator/leader/": ("orchestrator.daemon", "orchestrator.api", "orchestrator.cli"),
    "orchestrator/bounded/": ("orchestrator.store", "orchestrator.stream", "orchestrator.leader"),
    "orchestrator/placement/": ("orchestrator.store", "orchestrator.stream", "orchestrator.leader"),
    "orchestrator/warmth/": ("orchestrator.store", "orchestrator.stream", "orchestrator.leader"),
    **{
        f"orchestrator/{pure}.py": ("orchestrator.store", "orchestrator.stream", "orchestrator.leader")
        for pure in (
            "actors",
            "admission",
            "backoff",
            "batch_sizes",
            "batching",
            "cancellation",
            "config",
            "crews",
            "errors",
            "explanation",
            "gates",
            "identity",
            "jobs",
            "jsontext",
            "leases",
            "limits",
            "names",
            "pace",
            "policies",
            "pools",
            "ranking",
            "rates",
            "scaling",
            "schedules",
            "setting_values",
            "settings",
            "spawning",
            "tallies",
            "triggers",
            "wording",
            "workflows",
        )
    },
}


def climbs(name: str, tree: ast.AST) -> list[str]:
    """Imports of a layer that stands above."""
    # The dot: orchestrator.client is no part of orchestrator.cli.
    forbidden = tuple(f"{upper}." for layer, uppers in ABOVE.items() if name.startswith(layer) for upper in uppers)
    found = []
    for node in nodes(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [f"{name}:{module}" for module in modules if f"{module}.".startswith(forbidden)]
    return found


def _table(call: ast.expr) -> str | None:
    """The table of update(table)…values(…), however long the chain in between."""
    while isinstance(call, ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id in {"update", "insert"} and call.args:
            return ast.unparse(call.args[0])
        if not isinstance(call.func, ast.Attribute):
            return None
        call = call.func.value
    return None


def status_writes(name: str, tree: ast.AST) -> list[str]:
    """UPDATEs of a job's status: only `store.moves.move` may, since only it guards and audits."""
    found = []
    for node in nodes(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "values"):
            continue
        keys = {keyword.arg for keyword in node.keywords}
        keys |= {ast.unparse(k).strip("'\"") for a in node.args if isinstance(a, ast.Dict) for k in a.keys if k}
        if _table(node.func.value) in {"jobs", "schema.jobs"} and keys & {"status", "jobs.c.status"}:
            found.append(f"{name}:{node.lineno}")
    return [] if name == "orchestrator/store/moves.py" else found


def dialect_words(name: str, tree: ast.AST) -> list[str]:
    """Names and texts that speak of one database; documentation may."""
    if name.startswith(DIALECT_FILES):
        return []
    texts = [node.value for node in nodes(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    prose = set(map(id, texts))
    words = []
    for node in nodes(tree):
        attribute = SPOKEN.get(type(node))
        text = getattr(node, attribute) if attribute and id(node) not in prose else None
        if isinstance(text, str) and DIALECT_WORD.search(text):
            words.append(f"{name}:{getattr(node, 'lineno', '?')} {text!r}")
    return words


def swallowed_errors(name: str, tree: ast.AST) -> list[str]:
    """`except Exception: pass` in all its spellings."""
    wide = {"Exception", "BaseException", None}
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type and ast.unparse(node.type)
            silent = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
            if caught in wide and silent:
                found.append(f"{name}:{node.lineno}")
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            found += [f"{name}:{node.lineno}" for a in node.args if ast.unparse(a) in wide]
    return found


def nameless_threads(name: str, tree: ast.AST) -> list[str]:
    return [
        f"{name}:{node.lineno}"
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in {"Thread", "threading.Thread"}
        and not any(keyword.arg == "name" for keyword in node.keywords)
    ]


def unordered_locks(name: str, tree: ast.AST) -> list[str]:
    """UPDATEs that leave it to the planner along which index they lock: two of them deadlock now and then.

    That is all of leases, and those of a list of rows: where it names most of a table, the planner would rather scan.
    """
    chosen = {
        id(argument)
        for node in nodes(tree)
        if isinstance(node, ast.Call) and dotted(node.func) in {"by_key", "walking"}
        for argument in node.args
    }
    found = []
    for node in nodes(tree):
        if not isinstance(node, ast.Call) or id(node) in chosen:
            continue
        leased = dotted(node.func) == "update" and ast.unparse(node) in {"update(leases)", "update(schema.leases)"}
        listed = dotted(node.func).endswith(".where") and _table(node) and ".in_(" in ast.unparse(node)
        if leased or listed:
            found.append(f"{name}:{node.lineno}")
    return found


RULES = {
    closed_doors: ("orchestrator/jobs.py", "def f():\n    import redis"),
    climbs: ("worker/ledger.py", "from orchestrator.leader.duties import BATCH"),
    status_writes: ("orchestrator/store/outbox.py", "update(jobs).where(x).values(status='done')"),
    dialect_words: ("orchestrator/store/moves.py", "if dialect.name == 'mysql': pass"),
    swallowed_errors: ("worker/slot.py", "try:\n    f()\nexcept Exception:\n    pass"),
    unordered_locks: ("orchestrator/store/nodes.py", "by_key(update(leases)); conn.execute(update(leases))"),
    nameless_threads: ("worker/slot.py", "threading.Thread(target=f, daemon=True).start()"),
}


@cache
def broken() -> dict[str, list[str]]:
    """By the name of the rule, module by module: a tree takes as much to keep as to read."""
    found: dict[str, list[str]] = {rule.__name__: [] for rule in RULES}
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text(), name)
        for rule in RULES:
            found[rule.__name__] += rule(name, tree)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule):
    assert broken()[rule.__name__] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_can_be_broken(rule):
    name, source = RULES[rule]
    assert len(rule(name, ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sqlalchemy import Connection",
        "from orchestrator import jobs",
        "from . import redis",
    ],
)
def test_what_does_not_run_is_no_import(source):
    assert closed_doors("orchestrator/leader/term.py", ast.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "update(schema.jobs).values({'status': x})",
        "update(jobs).where(a).execution_options(b=1).values({jobs.c.status: x})",
        "insert(jobs).values(status='running')",
    ],
)
def test_a_status_write_is_seen_in_every_spelling(source):
    assert status_writes("worker/slot.py", ast.parse(source)) != []
    assert status_writes("orchestrator/store/moves.py", ast.parse(source)) == []


def test_an_update_of_a_list_goes_by_its_keys():
    def broken(source):
        return unordered_locks("orchestrator/store/outbox.py", ast.parse(source))

    assert broken("update(jobs).where(jobs.c.job_id.in_(ids)).values(queued=None)")
    assert broken("conn.execute(update(schema.gpus).where(a, gpus.c.gpu_uuid.in_(sorted(uuids))))")
    assert not broken("by_key(update(jobs)).where(jobs.c.job_id.in_(ids)).values(queued=None)")
    assert not broken("update(jobs).where(jobs.c.job_id == job_id).values(queued=None)")
    assert not broken("select(jobs.c.job_id).where(jobs.c.job_id.in_(ids))")


@pytest.mark.parametrize("how", ["conn.execute(statement)", "Hot(lambda _ids: statement).run(conn)"])
def test_a_status_write_is_seen_when_it_happens(how):
    """However its values were put together."""

    def run(path):
        values = {"status": "done"}
        known = {"conn": conn, "Hot": Hot, "statement": update(schema.jobs).values(values)}
        exec(compile(how, ROOT / path, "exec"), known)  # noqa: S102 - as if it stood in that file

    engine = create_engine("sqlite://")
    schema.jobs.create(engine)
    with engine.connect() as conn:
        for path in ("orchestrator/store/reports.py", "orchestrator/store/submit.py", "worker/ledger.py"):
            with pytest.raises(AssertionError, match=f"{path} writes a job's status"):
                run(path)
        run("orchestrator/store/moves.py")
        run("tests/factories.py")
    engine.dispose()


def test_there_is_something_to_check():
    assert len(MODULES) > 25
    assert any(name.startswith("worker/") for name in MODULES)
    assert [layer for layer in ABOVE if not any(name.startswith(layer) for name in MODULES)] == []


def test_every_error_stands_in_the_tree_with_its_code():
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.OrchestratorError)
    ]
    lines = {words[0]: words[1:] for line in errors.__doc__.splitlines() if (words := line.strip("│├└─ ").split())}
    for cls in classes:
        assert cls.__name__ in lines, f"{cls.__name__} is missing in the docstring of errors.py"
        if cls is not errors.OrchestratorError:
            assert cls.code in lines[cls.__name__], f"{cls.__name__}: the docstring does not show {cls.code}"
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes), "a code has one meaning"


def test_the_tree_shows_who_inherits_from_whom():
    """An error is drawn below its parent, deeper by one branch."""
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        name = (line.strip("│├└─ ").split() or [""])[0]
        cls = getattr(errors, name, None)
        if cls is None:
            continue
        depth = line.index(name)
        above = [entry for entry in above if entry[0] < depth]
        assert not above or cls.__bases__[0].__name__ == above[-1][1], f"{name} is drawn below the wrong error"
        above.append((depth, name))
