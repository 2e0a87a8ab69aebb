"""Leadership: one instance at a time does the work that needs one.

A term is a row in `leadership` with an epoch. Whoever wants to lead takes the lock (GET_LOCK on MariaDB, under
a name with the database's in it; a file lock beside SQLite) and then writes the row with epoch + 1. The lock only makes
it quick: who resigns releases it, and that of a killed leader ends with its connection, so either is followed within an
interval. The row makes it right:

- every transaction a leader writes in begins with `store.leadership.fence`, which checks the epoch in that very
  transaction; the Redis side checks it in the script that writes;
- a leader trusts its own term only until `trusted_until` on its monotonic clock, counted from the *start* of the
  last renewal and ending `leader_trust_margin_s` before the row expires, so it stops before anyone may follow;
- any error or doubt ends the term at once: the duties stop, the lock is given up, and it stands for election again;
- a frozen process loses the lock because its session's wait_timeout ends, and its first write after waking finds a
  newer epoch.

A database that forgot terms (a failover to a replica that lagged, a row set back by hand) would issue epochs that
Redis has seen already. A leader that Redis refuses although its row is good begins a term above what refused it.

Where the server's lock proves nothing (Galera), the row alone decides: a successor then waits until it expires.

`term` wins and keeps terms, `duties` is the table of what a leader does, `loop` runs the two. Duties work with a
`context`; those that keep rows and streams together stand in `delivery`; `apart` keeps a row that somebody holds from
costing more than what needs it.
"""
