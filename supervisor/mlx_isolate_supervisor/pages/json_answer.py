"""Answers in JSON of the supervisor's own endpoints, which hold for the moment only."""

from typing import Any

import msgspec
from aiohttp import web

_HEADERS = {"Cache-Control": "no-store"}


def json_answer(shown: Any, status: int = 200) -> web.Response:
    """`shown`, which msgspec can encode (what is JSON already as `msgspec.Raw`)."""
    return web.Response(
        body=msgspec.json.encode(shown),
        status=status,
        content_type="application/json",
        headers=_HEADERS,
    )
