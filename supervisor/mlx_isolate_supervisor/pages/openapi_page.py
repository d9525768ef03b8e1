"""Serves the OpenAPI document, which is generated from the structs that engines decode into."""

from importlib.resources import files

from aiohttp import web


class OpenApiPage:
    """Reads the document at the first request."""

    def __init__(self) -> None:
        self._body: bytes | None = None

    def add_to(self, app: web.Application) -> None:
        """Mount /openapi.json."""
        app.router.add_get("/openapi.json", self._document)

    async def _document(self, request: web.Request) -> web.Response:
        if self._body is None:
            self._body = files("mlx_isolate_supervisor").joinpath("openapi.json").read_bytes()
        return web.Response(body=self._body, headers={"Content-Type": "application/json"})
