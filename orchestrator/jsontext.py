"""JSON as we store it: one text form, bounded depth, nothing that another parser would read differently."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from orchestrator.errors import InvalidInput

#: Text may come with every character escaped (six bytes for two) and with spaces; as we store it, it has neither.
ESCAPED = 4

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def canonical_json(value: object, name: str, max_depth: int) -> str:
    """The one text form of a JSON value: sorted keys, no spaces, valid UTF-8, no NaN, bounded depth."""
    check_depth(value, name, max_depth)
    return plain_json(value, name)


def plain_json(value: object, name: str) -> str:
    """The same, as deep as Python can go."""
    try:
        text = _encode(value)
        text.encode()
    except RecursionError:
        raise InvalidInput(f"{name} is nested too deeply", name) from None
    except UnicodeEncodeError:
        raise InvalidInput(
            f"{name} is not plain JSON: a text has half of a character (a lone surrogate)", name
        ) from None
    except (ValueError, TypeError) as unfit:
        why = "it has no NaN, and no number beyond 1.7e308" if "Out of range" in str(unfit) else unfit
        raise InvalidInput(f"{name} is not plain JSON: {why}", name) from None
    return text


def strict_json(raw: bytes, name: str) -> Any:
    """Parse text of which only one reading is possible. Raises InvalidInput.

    Refused: what JSON does not have (NaN, Infinity) and what two parsers read differently (a key that occurs twice, a
    byte order mark, invalid UTF-8).
    """
    try:
        return json.loads(raw.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidInput(f"{name} is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{name} is not UTF-8") from None
    except json.JSONDecodeError as wrong:
        raise InvalidInput(f"{name} is not JSON: {wrong}") from None
    except _Refused as wrong:
        raise InvalidInput(f"{name} {wrong}") from None
    except ValueError:  # the only other that it raises
        raise InvalidInput(f"{name} has a whole number of thousands of digits") from None


def listed(text: str | None) -> list[str]:
    """The names in a column that is NULL where there are none.

    What is no list of names has none: who reads the rows of many must not stumble over that of one.
    """
    try:
        return names_in(text)
    except ValueError:
        return []


def names_in(text: str | None) -> list[str]:
    """The same, for whom it matters that all were read. Raises ValueError."""
    names = _parsed(text) if text else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("not a list of names")
    return names


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Refused(Exception):
    """Not a ValueError, which the parser raises itself."""


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"is not JSON: it has no {name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _Refused("is ambiguous: an object has the same key twice")
    return made


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
