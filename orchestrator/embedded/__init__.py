"""The servers of the embedded mode: a data directory held by one process, and a Valkey server inside it."""
