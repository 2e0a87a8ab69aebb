"""Listings come in pages. What the server looks at for one is bounded: it may be short, or empty, before the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.client.api import Api

Page = dict[str, Any]


def filled(api: Api, path: str, noun: str, filters: Mapping[str, Any]) -> Page:
    """One page with as many rows as `limit` says, of as many as that takes."""
    page: Page = api.get(path, filters)
    while page["next_cursor"] is not None and (missing := filters["limit"] - len(page[noun])) > 0:
        more = api.get(path, {**filters, "limit": missing, "cursor": page["next_cursor"]})
        page = more | {noun: page[noun] + more[noun]}
    return page


def whole(api: Api, path: str, noun: str) -> Page:
    """All pages as one."""
    page: Page = api.get(path)
    while (cursor := page.get("next_cursor")) is not None:  # GPUs have no pages
        more = api.get(path, {"cursor": cursor})
        page = more | {noun: page[noun] + more[noun]}
    return page
