"""Which databases whole workers are tried on, and how they are made to wait."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import NullPool, create_engine, select

from orchestrator.store import schema
from tests.cluster import Cluster

#: Starting processes costs seconds, and what the databases do differently is tested with the store. So most tests
#: here run on MariaDB and Redis; those with this mark on the embedded pair as well.
EMBEDDED_TOO = pytest.mark.parametrize("database_url", ["mariadb", "sqlite"], indirect=True)


@contextmanager
def locked_gpus(cluster: Cluster) -> Iterator[None]:
    """Lock the rows of all GPUs. By a session of no cluster's: theirs the server ends when they idle for a second."""
    engine = create_engine(cluster.settings.database_url, poolclass=NullPool)
    with engine.begin() as holder:
        holder.execute(select(schema.gpus).with_for_update()).all()
        yield
