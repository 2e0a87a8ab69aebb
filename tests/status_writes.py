"""While tests run, no UPDATE of a job's status leaves the store but by `store.moves`: only it guards and audits.

The contract that reads the source (`tests/contracts`) cannot see what a dictionary holds that was made elsewhere.
"""

import sys
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

ROOT = Path(__file__).parents[1]
#: What stands between a statement and whoever wrote it.
_BETWEEN = ("/sqlalchemy/", "/orchestrator/store/hot.py")
_OURS = tuple(f"{ROOT}/{top}/" for top in ("orchestrator", "worker"))


def watch() -> None:
    event.listen(Engine, "before_cursor_execute", _look)


def _look(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
    # In a condition there would be spaces round the sign.
    if statement.startswith("UPDATE orchestrator_jobs ") and " status=" in statement:
        author = _author()
        assert not author.startswith(_OURS) or author.endswith("/store/moves.py"), f"{author} writes a job's status"


def _author() -> str:
    """The file of whoever had it executed; a test may do as it likes."""
    frame = sys._getframe(2)
    while frame.f_back and any(part in frame.f_code.co_filename for part in _BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename
