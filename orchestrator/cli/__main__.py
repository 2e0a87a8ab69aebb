"""`python -m orchestrator.cli` is `gpuorch`."""

from orchestrator.cli import main

main()
