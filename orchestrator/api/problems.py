"""Errors as RFC 9457 problems: one table says which of our errors is which HTTP status.

Beside the tree in `orchestrator.errors` there are those only HTTP knows:

OrchestratorError
├── InvalidInput
│   └── MalformedBody         malformed_body          the body is not the JSON text it claims to be
├── BodyTooSlow               body_timeout            the body did not arrive in time
├── UnsupportedMediaType      unsupported_media_type
├── WrongHost                 wrong_host              the Host header names another server (DNS rebinding)
└── ForeignOrigin             foreign_origin          a web page of another origin sent this
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator import errors
from orchestrator.api.replies import Json
from orchestrator.errors import InvalidInput, OrchestratorError
from orchestrator.jobs import TERMINAL
from orchestrator.wording import in_our_words

log = logging.getLogger(__name__)

#: Seconds after which a server that was away is worth another try.
RETRY_AFTER_S = 1.0
#: Characters of a field's name that are repeated to the client.
MAX_FIELD = 80


class MalformedBody(InvalidInput):
    code = "malformed_body"


class BodyTooSlow(OrchestratorError):
    code = "body_timeout"


class UnsupportedMediaType(OrchestratorError):
    code = "unsupported_media_type"


class WrongHost(OrchestratorError):
    code = "wrong_host"


class ForeignOrigin(OrchestratorError):
    code = "foreign_origin"


#: The nearest class in an error's own ancestry decides.
STATUS: dict[type[OrchestratorError], int] = {
    OrchestratorError: 500,
    errors.InvalidInput: 422,
    errors.PayloadTooLarge: 413,
    MalformedBody: 400,
    BodyTooSlow: 408,
    UnsupportedMediaType: 415,
    WrongHost: 421,
    ForeignOrigin: 403,
    errors.NotFound: 404,
    errors.JobConflict: 409,
    errors.TaskOfWorkflow: 409,
    errors.WorkflowConflict: 409,
    errors.WorkflowEnded: 409,
    errors.WorkflowBusy: 409,
    errors.WorkflowGrown: 409,
    errors.JobEnded: 409,
    errors.JobNotWaiting: 409,
    errors.JobCancelled: 409,
    errors.NotOwner: 409,
    errors.NotRedrivable: 409,
    errors.RedriveLimit: 409,
    errors.PoolExists: 409,
    errors.PoolClosed: 409,
    errors.PoolBusy: 409,
    errors.NotLeader: 409,
    errors.StaleEpoch: 409,
    errors.LeaseEnded: 410,
    errors.WorkerExists: 409,
    errors.WorkerLost: 410,
    errors.Overloaded: 429,
    errors.Paused: 503,
    errors.Unavailable: 503,
}
#: Codes of the statuses that the framework itself answers with.
FRAMEWORK_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 431: "headers_too_large"}
#: What a client reads instead of our own message, which may name servers and statements.
PUBLIC_DETAILS = {
    "internal_error": "something broke here that should not; the log of the server has the trace",
    "database_unavailable": "the database does not answer; a submit with its own job_id may be repeated",
    "redis_unavailable": "Redis does not answer",
}


def problem(status: int, code: str, detail: str, field: str | None = None) -> dict[str, Any]:
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": PUBLIC_DETAILS.get(code, detail),
        "code": code,
    }
    return body if field is None else body | {"field": field}


def describe(error: OrchestratorError) -> dict[str, Any]:
    """The problem that one of our errors is to a client."""
    if isinstance(error, errors.ResultNotFound) and error.status not in TERMINAL:
        detail = f"{error.message} yet; wait for it with GET /jobs/{{id}}?wait=30"
        return problem(409, "result_not_ready", detail)
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    code = error.code if status != 500 else "internal_error"
    body = problem(status, code, error.message, getattr(error, "field", None))
    wait_s = _wait_s(error)
    return body if wait_s is None else body | {"retry_after": wait_s}


def _wait_s(error: OrchestratorError) -> float | None:
    """Seconds until it is worth another try; None when it is not."""
    if isinstance(error, errors.Overloaded | errors.Paused):
        return error.retry_after_s
    return RETRY_AFTER_S if isinstance(error, errors.Unavailable) else None


def invalid(found: Sequence[Mapping[str, Any]]) -> InvalidInput:
    """The first thing that pydantic found wrong, as our own error."""
    first = found[0]
    path = [str(part) for part in first["loc"] if part not in {"query", "path", "body"}]
    field = ".".join(path)[:MAX_FIELD] or "body"
    if first["type"] == "extra_forbidden":
        return InvalidInput(f"unknown field {field!r}; see /openapi.json", field)
    return InvalidInput(f"{field}: {in_our_words(first)}", field)


def invalid_model(wrong: ValidationError) -> InvalidInput:
    return invalid(wrong.errors(include_url=False, include_input=False))


def reply(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Json:
    return Json(body, body["status"], dict(headers or {}), media_type="application/problem+json")


def reply_to(error: OrchestratorError) -> Json:
    body = describe(error)
    if body["status"] >= 500:
        log.warning("request failed", extra={"code": error.code, "error": error.message})
    return reply(body, _headers(error))


def _headers(error: OrchestratorError) -> dict[str, str]:
    wait_s = _wait_s(error)
    if wait_s is not None:
        # Whole seconds, and never too early; the body has it exactly.
        return {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return {"Connection": "close"} if isinstance(error, BodyTooSlow) else {}


async def _ours(request: Request, error: Exception) -> Json:
    assert isinstance(error, OrchestratorError)
    if isinstance(error, errors.NotFound) and (others := _other_methods(request)):
        return await _framework(request, HTTPException(405, headers={"Allow": ", ".join(sorted(others))}))
    return reply_to(error)


def _other_methods(request: Request) -> set[str]:
    """Methods of this very path, if the one that was used is none of them.

    Such a path was taken for somebody's id: GET /jobs/submit asks for the job `submit`, which there may be.
    """
    path = request.scope["path"]
    methods = {method for route in request.app.routes if route.path == path for method in route.methods}
    return set() if request.method in methods else methods


async def _validation(_request: Request, error: Exception) -> Json:
    assert isinstance(error, RequestValidationError)
    return reply_to(invalid(error.errors()))


async def _framework(request: Request, error: Exception) -> Json:
    assert isinstance(error, HTTPException)
    code = FRAMEWORK_CODES.get(error.status_code, "http_error")
    detail = f"{request.method} {request.url.path[:MAX_FIELD]}: see /openapi.json for what there is"
    return reply(problem(error.status_code, code, detail), error.headers)


class Unexpected:
    """ASGI middleware: what nobody foresaw is logged with its trace and answered without it.

    Not an exception handler: the framework raises the error again after those, and the server then closes the
    connection under the client's next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            log.debug("client left before its request was whole", extra={"method": scope.get("method")})
        except Exception:
            if started:
                raise
            log.exception("request broke", extra={"method": scope.get("method")})
            await reply(problem(500, "internal_error", ""))(scope, receive, send)


def install(app: FastAPI) -> None:
    app.add_middleware(Unexpected)
    app.add_exception_handler(OrchestratorError, _ours)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _framework)
