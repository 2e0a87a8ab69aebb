"""Which databases whole workers are tried on."""

import pytest

#: Starting processes costs seconds, and what the databases do differently is tested with the store. So most tests
#: here run on MariaDB and Redis; those with this mark on the embedded pair as well.
EMBEDDED_TOO = pytest.mark.parametrize("database_url", ["mariadb", "sqlite"], indirect=True)
