"""The orchestrator: accepts jobs, remembers them, leads."""

__version__ = "0.1.0"
