"""`python -m tests`: all tests, in two halves side by side. What it is told besides goes to pytest, as one run.

One half computes, the other mostly waits for whole processes that are killed, frozen and replaced; each starts
servers of its own. The second half's output is kept until the first is done, so that both can be read.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
#: Folders whose tests run whole systems. All others, also those to come, are the first half.
SYSTEMS = ("chaos", "client", "e2e", "worker")


def main() -> int:
    if sys.argv[1:]:
        return subprocess.call([*_PYTEST, *sys.argv[1:]])
    places = sorted({ROOT / path.relative_to(ROOT).parts[0] for path in ROOT.rglob("test_*.py")})
    systems = [path for path in places if path.name in SYSTEMS]
    with tempfile.TemporaryFile() as kept:
        second = subprocess.Popen([*_PYTEST, *map(str, systems)], stdout=kept, stderr=subprocess.STDOUT)
        try:
            first = subprocess.call([*_PYTEST, *(str(path) for path in places if path not in systems)])
            print(f"now those of {', '.join(SYSTEMS)}, which ran beside …", flush=True)
            last = second.wait()
        finally:
            second.kill()
        kept.seek(0)
        sys.stdout.buffer.write(kept.read())
        sys.stdout.flush()
    return first or last


_PYTEST = (sys.executable, "-m", "pytest")

if __name__ == "__main__":
    sys.exit(main())
