"""What a handler returned or raised, as the supervisor wants to hear it: how the job ended, and its result's JSON."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from orchestrator.errors import InvalidInput
from orchestrator.jsontext import canonical_json
from worker.handlers import Cancelled, OutOfTime, Permanent, Retry, Skip

#: Levels a result may nest, as a payload may by default.
MAX_DEPTH = 64
#: Whatever a handler raises is its answer, except what is meant for the interpreter.
RAISED = (Exception, SystemExit, Cancelled)

Answer = tuple[dict[str, Any], str]


class NotVouchedFor(Exception):
    """Its worker may have been declared dead, and the job given to another."""


def of_job(call: Callable[[], object], result_limit: int) -> Answer:
    try:
        value = call()
    except RAISED as error:
        return _raised(error), ""
    return _returned(value, result_limit)


def of_batch(call: Callable[[], object], size: int, result_limit: int) -> list[Answer]:
    """One answer for each job: its result, or the exception in its place."""
    try:
        values = _checked(call(), size)
    except NotVouchedFor as error:
        return [(_raised(error), "")] * size
    except RAISED as error:
        return [(_raised(error) if size == 1 else _failed_together(error, size), "")] * size
    return [(_raised(v), "") if isinstance(v, RAISED) else _returned(v, result_limit) for v in values]


def _checked(values: object, size: int) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError(f"a handler with `batch` returns a list, not {type(values).__name__}")
    if len(values) != size:
        raise ValueError(f"{len(values)} results for {size} jobs")
    return values


def _raised(error: BaseException) -> dict[str, Any]:
    match error:
        case NotVouchedFor():
            return {"outcome": "handed_back", "error": _text(error)}
        case Cancelled():  # a failure, if nobody cancelled it
            return _failed("transient", error) | {"outcome": "cancelled"}
        case Skip():
            return {"outcome": "skipped", "error": _text(error)}
        case Permanent():
            return _failed("permanent", error)
        case OutOfTime():
            return _failed("timeout", error)
        case Retry():
            return _failed("transient", error) | {"retry_after_s": error.after}
        case _:
            return _failed("transient", error) | {"error": trace(error)}


def _failed(kind: str, error: BaseException) -> dict[str, Any]:
    return {"outcome": "failed", "error_kind": kind, "error": said(error)}


def _failed_together(error: BaseException, size: int) -> dict[str, Any]:
    """Whose fault it was will show when each runs alone; until then it is nobody's, not even if it says Permanent."""
    return {
        "outcome": "handed_back",
        "error_kind": "batch",
        "error": f"its batch of {size} failed as a whole: {said(error)}\n{trace(error)}",
        "retry_after_s": error.after if isinstance(error, Retry) else None,
    }


def said(error: BaseException) -> str:
    """Its kind and what it says, in a line."""
    return f"{type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    """An exception is the handler's own code, too, and may fail at telling what it is."""
    try:
        return str(error)
    except Exception as unable:  # noqa: BLE001 - whatever it raises
        return f"(its text could not be had: {type(unable).__name__})"


def trace(error: BaseException) -> str:
    """With the last of the frames that it came through."""
    return "".join(traceback.format_exception(error, limit=-8))


def _returned(value: object, result_limit: int) -> Answer:
    """A result must be JSON of bounded size; anything else cannot be stored, and trying again will not help."""
    try:
        text = canonical_json(value, "result", MAX_DEPTH)
        size = len(text.encode())
    except InvalidInput as unfit:
        return {"outcome": "failed", "error_kind": "bad_result", "error": str(unfit)}, ""
    if size > result_limit:
        error = f"result has {size} bytes, the limit is {result_limit}; store it elsewhere, return a reference"
        return {"outcome": "failed", "error_kind": "bad_result", "error": error}, ""
    return {"outcome": "done"}, text
