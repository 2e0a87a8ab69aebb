"""JSON as we store it: one text form, bounded depth, nothing that another parser would read differently."""

from __future__ import annotations

import json

from orchestrator.errors import InvalidInput


def canonical_json(value: object, name: str, max_depth: int) -> str:
    """The one text form of a JSON value: sorted keys, no spaces, valid UTF-8, no NaN, bounded depth."""
    check_depth(value, name, max_depth)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, UnicodeEncodeError) as unfit:
        raise InvalidInput(f"{name} is not plain JSON: {unfit}", name) from None
    return text


def check_depth(value: object, name: str, max_depth: int) -> None:
    """Raises InvalidInput. Level by level, not by recursion: the input decides how deep it is."""
    level, depth = [value], 0
    while level:
        level = [child for node in level for child in _children(node)]
        depth += 1
        if depth > max_depth:
            raise InvalidInput(f"{name} is nested deeper than {max_depth} levels", name)


def _children(node: object) -> list[object]:
    if isinstance(node, dict):
        return [child for child in node.values() if isinstance(child, dict | list | tuple)]
    if isinstance(node, list | tuple):
        return [child for child in node if isinstance(child, dict | list | tuple)]
    return []
