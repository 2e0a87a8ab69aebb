<%
    import re
    lines = [line for line in (upgrades or "pass").splitlines() if not line.strip().startswith("# ###")]
    body = "\n".join(lines).strip().replace("op.add_column(", "add_column(")
    needs_sa = "sa." in body or any(name in body for name in ("LONG_TEXT", "UTC_DATETIME", "COUNTER", "utc_now"))
    long = any(len(string) > 97 for string in re.findall(r'"[^"]*"', body))
%>\
% if long:

% endif
"""${message}.

Written from orchestrator/store/schema.py and frozen since: a change of the schema is a new migration.
There is no way back: expand first, contract one release later.
"""

% if needs_sa:
import sqlalchemy as sa
% endif
from alembic import op
% if "LONG_TEXT" in body or "UTC_DATETIME" in body:
from sqlalchemy.dialects import mysql
% endif

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None

% if "LONG_TEXT" in body:
LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
% endif
% if "UTC_DATETIME" in body:
UTC_DATETIME = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
% endif
% if "COUNTER" in body:
COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
% endif


% if "utc_now" in body:
def utc_now() -> sa.TextClause:
    """Default of a column: the database's clock in UTC."""
    sqlite = op.get_context().dialect.name == "sqlite"
    return sa.text("(strftime('%Y-%m-%d %H:%M:%f000', 'now'))" if sqlite else "utc_timestamp(6)")


% endif
% if "add_column(" in body:
def add_column(table: str, column: sa.Column[object]) -> None:
    """Add a column unless a migration killed half-way did: MariaDB commits each by itself."""
    if column.name not in {known["name"] for known in sa.inspect(op.get_bind()).get_columns(table)}:
        op.add_column(table, column)


% endif
def upgrade() -> None:
    ${body}
