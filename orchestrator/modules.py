"""Do the modules with handlers exist? Looked up as an import would, without running anything of them.

Whoever starts workers asks before it starts anything: a worker with a mistyped module would try for ever. Only what
certainly is not there is refused; whatever else is wrong with a module, its import in a slot tells.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from orchestrator.errors import ConfigError

#: A module whose text has one of these may have others below it that no file shows before it runs.
_OF_ITS_OWN_MAKING = re.compile(r"__path__|declare_namespace|sys\.modules|meta_path")


def require_modules(names: Sequence[str]) -> None:
    """Raises ConfigError for the first that neither the working directory nor Python's path has."""
    if not names:
        return
    importlib.invalidate_caches()  # a file may be as new as this moment
    here = os.getcwd()  # noqa: PTH109 - a text, as sys.path holds
    for name in names:
        missing = _missing(name, [here, *filter(None, sys.path)])
        if missing is not None:
            raise ConfigError(
                f"worker_handlers = {name!r}: there is no module {missing!r}; {_advice(name)}, or install it,"
                f" or start where its file is (this is {here})"
            )


def _advice(name: str) -> str:
    return f"write {name[:-3]!r}, without .py" if name.endswith(".py") else "correct the name"


def _missing(name: str, path: Sequence[str]) -> str | None:
    """The first of a module and its packages, outermost first, that certainly is not there."""
    try:
        return _first_missing(name, path)
    except Exception:  # noqa: BLE001 - finders of others, unreadable files: the import will meet them again
        return None


def _first_missing(name: str, path: Sequence[str]) -> str | None:
    parts = name.split(".")
    below: Sequence[str] | None = None  # of none: along the path itself
    for depth in range(1, len(parts) + 1):
        looked = ".".join(parts[:depth])
        spec = _along(looked, path if below is None else below)
        if spec is None:
            return None if _known_otherwise(looked, below) else looked
        if _makes_modules(spec):
            return None
        below = spec.submodule_search_locations or ()
    return None


def _along(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """What files say. Not by Python's own search: it wants packages without `__init__` imported to look into them."""
    portions: list[str] = []
    for entry in path:
        finder = pkgutil.get_importer(entry)
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec and spec.submodule_search_locations) or ()
    if not portions:
        return None
    spread = ModuleSpec(name, None, is_package=True)
    spread.submodule_search_locations = portions
    return spread


def _known_otherwise(name: str, path: Sequence[str] | None) -> bool:
    """Built in, frozen, or known to a finder that an installer left behind."""
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    return any(finder.find_spec(name, path) is not None for finder in others)


def _makes_modules(spec: ModuleSpec) -> bool:
    """Whether what lies below it cannot be known before it runs; where there is no text, nobody knows."""
    if spec.loader is None:
        return False  # a directory without `__init__`
    text = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
    return text is None or _OF_ITS_OWN_MAKING.search(text) is not None
