"""What is wrong, in words for people: with a value, whatever library found it; of an error, the line that says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from orchestrator.names import ALPHABETS

_TIME = "must be an ISO 8601 time with a zone, such as 2030-01-31T12:00:00Z"
#: By pydantic's name for the error; the braces are what it tells beside it.
_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "string_type": "must be a text",
    "string_unicode": "must be a text of whole characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of a sensible size",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "is_instance_of": "must be a {class}",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "dict_type": "must be an object",
    "mapping_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "datetime_type": _TIME,
    "datetime_parsing": _TIME,
    "datetime_object_invalid": _TIME,
    "datetime_from_date_parsing": _TIME,
    "timezone_aware": _TIME,
}


def first_wrong(invalid: ValidationError) -> tuple[str, str]:
    """The path of the first field that is wrong, empty where it is the whole, and what is wrong with it."""
    first = invalid.errors(include_url=False, include_input=False)[0]
    return ".".join(str(part) for part in first["loc"]), in_our_words(first)


def in_our_words(found: Mapping[str, Any]) -> str:
    """One of `ValidationError.errors()`, with its context, as what follows the name of the field."""
    kind, about = found["type"], found.get("ctx", {})
    if kind == "value_error":  # raised by a validator of ours
        return str(about["error"])
    if kind == "string_pattern_mismatch":
        return f"must be made of {ALPHABETS.get(about['pattern'], about['pattern'])}"
    return _WORDS[kind].format(**about) if kind in _WORDS else str(found["msg"])


def telling_line(text: str) -> str:
    """Of an error the line that says what went wrong: the first of its message, which may have several."""
    # Traces of a group of exceptions stand behind a bar; those of its members are further in.
    inside = (line.removeprefix("  | ") for line in text.splitlines())
    lines = [line for line in inside if line.strip()]
    frames = [n for n, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return lines[0].strip() if lines else text
    # A trace that was cut has nothing after it.
    return next((line.strip() for line in lines[frames[-1] :] if not line[0].isspace()), lines[-1].strip())
