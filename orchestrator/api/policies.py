"""/policies: what operators decide at run time. Every change has a version, and any of them can be made so again."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api.backend import Api, Backend
from orchestrator.api.body import documented, read_json, read_model
from orchestrator.api.replies import Json, page_of
from orchestrator.policies import DOCUMENTS, EVERYWHERE, MAX_KEY, Scope, named, new_name, parse
from orchestrator.store import policies
from orchestrator.triggers import MAX_TEMPLATE

router = APIRouter(prefix="/policies", tags=["policies"])

#: Bytes that suffice for a policy: characters of a trigger's template may take several each.
BODY_LIMIT = 8 * MAX_TEMPLATE


class PageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(500, ge=1, le=1000)
    cursor: str | None = Field(None, max_length=MAX_KEY, description="the last name already seen")


class HistoryQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=1000)


class RollbackBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Annotated[int, Field(ge=1, lt=2**31)]


async def _page(api: Backend, scope: Scope, query: PageQuery) -> Json:
    found = await api.read(lambda conn: policies.page(conn, scope, query.cursor or "", query.limit))
    return page_of("policies", found, "name", query.limit)


async def _get(api: Backend, scope: Scope, name: str) -> Json:
    return Json(await api.read(lambda conn: policies.get(conn, scope, named(scope, name))))


async def _put(request: Request, api: Backend, scope: Scope, name: str) -> Json:
    document = parse(scope, await read_json(request, BODY_LIMIT))
    version = await api.write(lambda conn: policies.put(conn, scope, new_name(scope, name), document))
    api.policies_changed()
    return Json(_told(scope, name, version, document.model_dump(exclude_unset=True)))


async def _delete(api: Backend, scope: Scope, name: str) -> Json:
    await api.write(lambda conn: policies.remove(conn, scope, named(scope, name)))
    api.policies_changed()
    return Json({"scope": scope, "name": name, "deleted": True})


async def _history(api: Backend, scope: Scope, name: str, query: HistoryQuery) -> Json:
    found = await api.read(lambda conn: policies.history(conn, scope, named(scope, name), query.limit))
    return Json({"scope": scope, "name": name, "changes": found})


async def _roll_back(request: Request, api: Backend, scope: Scope, name: str) -> Json:
    wanted = await read_model(request, RollbackBody, BODY_LIMIT)

    def work(conn: Any) -> dict[str, Any]:
        version = policies.roll_back(conn, scope, named(scope, name), wanted.version)
        document = None if version is None else policies.get(conn, scope, name)["document"]
        return _told(scope, name, version, document)

    answer = await api.write(work)
    api.policies_changed()
    return Json(answer)


def _told(scope: Scope, name: str, version: int | None, document: dict[str, Any] | None) -> dict[str, Any]:
    return {"scope": scope, "name": name, "version": version, "document": document}


def _schema(scope: Scope) -> dict[str, Any]:
    return documented(DOCUMENTS[scope].model_json_schema())


_ROLLBACK = documented(RollbackBody.model_json_schema())


def _routes(scope: Scope, noun: str, name: str = "{name}") -> None:
    """The calls of one scope. A name with slashes is a path: then what stands behind it must be asked for first."""
    one = f"/{noun}/{name}"

    @router.get(f"/{noun}")
    async def page(api: Api, query: Annotated[PageQuery, Query()]) -> Json:
        """By name; `*` is for all that have none of their own. `next_cursor` is null at the end."""
        return await _page(api, scope, query)

    @router.get(f"{one}/history")
    async def history(api: Api, name: str, query: Annotated[HistoryQuery, Query()]) -> Json:
        """Every change, newest first: who, when, before, after."""
        return await _history(api, scope, name, query)

    @router.post(f"{one}/rollback", openapi_extra=_ROLLBACK)
    async def roll_back(request: Request, api: Api, name: str) -> Json:
        """Make so again what `version` made so; `document` is null when there was none then."""
        return await _roll_back(request, api, scope, name)

    @router.get(one)
    async def get(api: Api, name: str) -> Json:
        return await _get(api, scope, name)

    @router.put(one, openapi_extra=_schema(scope))
    async def put(request: Request, api: Api, name: str) -> Json:
        """The policy as a whole: what is left out has its default. In force everywhere within a second."""
        return await _put(request, api, scope, name)

    @router.delete(one)
    async def delete(api: Api, name: str) -> Json:
        return await _delete(api, scope, name)


_routes(Scope.AGENT, "agents")
_routes(Scope.TRIGGER, "triggers")
_routes(Scope.CONCURRENCY, "concurrency", "{name:path}")  # models and paths have slashes


@router.get("/admission")
async def get_admission(api: Api) -> Json:
    return await _get(api, Scope.ADMISSION, EVERYWHERE)


@router.put("/admission", openapi_extra=_schema(Scope.ADMISSION))
async def put_admission(request: Request, api: Api) -> Json:
    """The gates that all jobs pass, as a whole."""
    return await _put(request, api, Scope.ADMISSION, EVERYWHERE)


@router.delete("/admission")
async def delete_admission(api: Api) -> Json:
    return await _delete(api, Scope.ADMISSION, EVERYWHERE)


@router.get("/admission/history")
async def history_of_admission(api: Api, query: Annotated[HistoryQuery, Query()]) -> Json:
    return await _history(api, Scope.ADMISSION, EVERYWHERE, query)


@router.post("/admission/rollback", openapi_extra=_ROLLBACK)
async def roll_admission_back(request: Request, api: Api) -> Json:
    return await _roll_back(request, api, Scope.ADMISSION, EVERYWHERE)
