"""The truth: everything in MariaDB (or SQLite), and the only importer of SQLAlchemy.

`database` opens connections and runs transactions, `dialect` knows every difference between the two databases,
`schema` has the tables, `batcher` turns many small writes into one commit. The other modules own one noun each;
their functions take a connection inside a transaction, so that several of them can share one commit (claiming a
job and taking its lease is such a pair).

Rules that hold in here:
- every change of a job's status goes through `moves.move`, guarded by status and attempt; to its end a job goes through
  `followers.end`, which in the same transaction lets those go that waited for it;
- the audit row is written in the transaction of the change it describes;
- time is the database's clock (`dialect.utc_now`), never the host's;
- rows are locked in one order, so that nobody waits in a circle: the leader's fence; caps; leases; dead letters; jobs
  that are ended or claimed; GPUs; `spawns`; workflows; the waiting tasks of those. Whoever takes a row out of this
  order takes it with SKIP LOCKED. (A single task that is cancelled or expires is locked before its workflow, although
  others may hold that and wait for the task: the database ends one of the two, which then runs again.) A workflow's row
  is the lock of its graph: `task_edges` and `waits_for` change under it alone (`flows`);
- every function may be run again from its start after a lost connection: it then finds its own work done.
"""
