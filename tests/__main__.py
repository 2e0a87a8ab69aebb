"""`python -m tests`: all tests, in three parts side by side. What it is told besides goes to pytest, as one run.

One part computes, the others mostly run whole processes that are killed, frozen and replaced; each starts servers
of its own. Their output is kept until the first is done, so that all can be read.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent
#: Folders by part, so that all take about as long. All others, also those to come, are the first part.
SYSTEMS = (("gpu", "worker"), ("chaos", "client", "e2e", "leader"))
_PYTEST = (sys.executable, "-m", "pytest")


def main() -> int:
    if sys.argv[1:]:
        return subprocess.call([*_PYTEST, *sys.argv[1:]])
    beside = [name for part in SYSTEMS for name in part]
    places = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("test_*.py")}
    with ExitStack() as stack:
        parts = [Part(names, stack) for names in SYSTEMS]
        codes = [subprocess.call([*_PYTEST, *(str(ROOT / name) for name in sorted(places - {*beside}))])]
        codes += [part.finish() for part in parts]
    return max(codes)


class Part:
    def __init__(self, names: tuple[str, ...], stack: ExitStack) -> None:
        self._names = names
        self._output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        command = [*_PYTEST, *(str(ROOT / name) for name in names)]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)
        stack.callback(self._process.kill)

    def finish(self) -> int:
        """Wait for its end and show what it said."""
        print(f"tests of {', '.join(self._names)}, which ran beside …", flush=True)
        code = self._process.wait()
        self._output.seek(0)
        sys.stdout.buffer.write(self._output.read())
        sys.stdout.flush()
        return code


if __name__ == "__main__":
    sys.exit(main())
