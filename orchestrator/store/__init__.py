"""The truth: everything in MariaDB (or SQLite), and the only importer of SQLAlchemy.

`database` opens connections and runs transactions, `dialect` knows every difference between the two databases,
`schema` has the tables, `batcher` turns many small writes into one commit. The other modules own one noun each;
their functions take a connection inside a transaction, so that several of them can share one commit (claiming a
job and taking its lease is such a pair).

Rules that hold in here:
- every change of a job's status goes through `moves.move`, guarded by status and attempt;
- the audit row is written in the transaction of the change it describes;
- time is the database's clock (`dialect.utc_now`), never the host's;
- every function may be run again from its start after a lost connection: it then finds its own work done.
"""
