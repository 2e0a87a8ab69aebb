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
    except RuntimeError as wrapped:
        # What Python 3.11 makes of an error that comes while a class is being made, as of a module that is imported.
        if not isinstance(wrapped.__cause__, KeyboardInterrupt):
            raise
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
