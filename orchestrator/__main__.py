"""`python -m orchestrator` is `gpuorch`. It imports nothing before it can answer Ctrl-C: the rest takes a while."""

import sys

#: As shells say it: 128 + SIGINT.
INTERRUPTED = 130


def main() -> None:
    try:
        from orchestrator.cli import run

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
