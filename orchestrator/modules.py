"""Is there a module with handlers at all? Asked of an interpreter as slots have it; nothing of the module runs.

Whoever starts workers asks before it starts anything, so that a mistyped name is told at once. Only what certainly is
not there is refused, the outermost package of the first name: what lies below a package, and what later names mean, may
depend on what was imported before. Of those the first slot tells, which imports them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import ConfigError

#: Seconds for an interpreter to start, on a busy machine. Without an answer the import decides, as for all else.
PATIENCE_S = 30.0
_MISSING = 3
_LOOK = f"import importlib.util, sys; sys.exit({_MISSING} if importlib.util.find_spec(sys.argv[1]) is None else 0)"


def require_modules(names: Sequence[str], path: str | None = None) -> None:
    """Raises ConfigError when workers will not find the first; `path` is theirs, unless it is this process's."""
    if not names:
        return
    name = names[0]
    if name.endswith(".py") and Path(name).is_file():
        raise ConfigError(f"worker_handlers = {name!r}: write {name[:-3]!r}, without .py")
    outermost = name.partition(".")[0]
    if _is_missing(outermost, {} if path is None else {"PYTHONPATH": path}):
        raise ConfigError(not_there(f"worker_handlers = {name!r}", outermost))


def not_there(named: str, module: str) -> str:
    """What to tell whoever named it."""
    advice = f"correct the name, or install it, or start where its file is (this is {Path.cwd()})"
    return f"{named}: there is no module {module!r}; {advice}"


def _is_missing(module: str, environment: dict[str, str]) -> bool:
    command = [sys.executable, "-c", _LOOK, module]
    quiet = subprocess.DEVNULL
    try:
        asked = subprocess.run(
            command, env=os.environ | environment, stdin=quiet, stderr=quiet, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == _MISSING
