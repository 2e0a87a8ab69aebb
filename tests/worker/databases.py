"""Which databases whole workers are tried on, and how they are made to wait."""

from contextlib import AbstractContextManager

import pytest

from orchestrator.store import schema
from tests.cluster import Cluster
from tests.factories import holding

#: Starting processes costs seconds, and what the databases do differently is tested with the store. So most tests
#: here run on MariaDB and Redis; those with this mark on the embedded pair as well.
EMBEDDED_TOO = pytest.mark.parametrize("database_url", ["mariadb", "sqlite"], indirect=True)


def locked_gpus(cluster: Cluster) -> AbstractContextManager[None]:
    """Lock the rows of all GPUs."""
    return holding(cluster.db, schema.gpus)
