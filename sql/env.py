"""What Alembic runs to migrate a database or to write the next migration.

`orchestrator.store.migrate` calls it with an open connection; there is no alembic.ini and no address in here.
"""

from collections.abc import Iterable
from typing import Any, Literal

from alembic import context
from alembic.operations import ops

from orchestrator.store.dialect import LongText, UtcDateTime, utc_now
from orchestrator.store.schema import audit, metadata

#: Types and defaults that differ per database, by the names that script.py.mako spells out in each migration.
NAMED_TYPES = {LongText: "LONG_TEXT", UtcDateTime: "UTC_DATETIME", audit.c.id.type: "COUNTER"}


def render(kind: str, item: Any, _context: object) -> str | Literal[False]:
    """Python text for what Alembic would render for one database only; False leaves the rest to it."""
    if kind == "type":
        return next((name for known, name in NAMED_TYPES.items() if item is known), False)
    if kind == "server_default" and isinstance(getattr(item, "arg", None), utc_now):
        return "utc_now()"
    return False


def make_resumable(_context: object, _revision: object, directives: Iterable[Any]) -> None:
    """MariaDB commits each CREATE by itself: a migration killed half-way must be able to run again."""
    for script in directives:
        for operation in _flat(script.upgrade_ops.ops):
            if isinstance(operation, ops.CreateTableOp | ops.CreateIndexOp):
                operation.if_not_exists = True


def _flat(operations: Iterable[Any]) -> Iterable[Any]:
    for operation in operations:
        yield from _flat(operation.ops) if isinstance(operation, ops.OpContainer) else [operation]


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_item=render,
    process_revision_directives=make_resumable,
)
with context.begin_transaction():
    context.run_migrations()
