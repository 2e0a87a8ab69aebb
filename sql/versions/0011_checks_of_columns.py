"""checks of columns: where a job waits, how a lease ends, what is done to a workflow, how a GPU is, who runs a pool.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

from alembic import op

from orchestrator.store.dialect.checks import Check, add_checks

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


#: Table, column, its definition, the values that mean something.
CHECKS = (
    ("orchestrator_jobs", "queued", "VARCHAR(10) DEFAULT 'ready'", "'delayed', 'ready', 'announced', 'blocked'"),
    ("workflows", "sweep", "VARCHAR(8)", "'pending', 'all', 'retry', 'forget'"),
    ("orchestrator_leases", "ending_as", "VARCHAR(8)", "'released', 'expired', 'spent'"),
    ("gpus", "health", "VARCHAR(16) NOT NULL DEFAULT 'ok'", "'ok', 'unhealthy', 'lost', 'unknown'"),
    ("worker_pools", "provider", "VARCHAR(16) NOT NULL DEFAULT 'local'", "'local', 'external', 'kubernetes'"),
)


def upgrade() -> None:
    checks = [Check(table, column, made, f"{column} IN ({values})") for table, column, made, values in CHECKS]
    add_checks(op.get_bind(), checks)
