"""The files of /ui, served from memory with a policy that lets them load nothing else.

The files hold no secrets and need no key; what they show is fetched with one.
"""

import hashlib
from importlib.resources import files

import msgspec
from aiohttp import web

PAGE_PATH = "/ui"
# Asked for beside whatever is no page with an icon of its own: /status, say.
ICON_PATH = "/favicon.ico"
_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
# Nothing but this server's own files runs or is spoken to; no inline script, no inline style, no
# frame around the page (a click on "kill" must be a click on our button).
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class _File(msgspec.Struct, frozen=True):
    body: bytes
    type: str
    etag: str


class Page:
    """Reads the files at the first request, so that starting up does not wait for them."""

    def __init__(self) -> None:
        self._files: dict[str, _File] | None = None

    def add_routes(self, app: web.Application) -> None:
        """Mount /ui and its files, and the icon where browsers look for one by themselves."""
        app.router.add_get(PAGE_PATH, self._index)
        app.router.add_get(ICON_PATH, self._icon)
        app.router.add_get(PAGE_PATH + "/{name:[a-z_]*(?:\\.[a-z]+)?}", self._file)

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return self._answer(request, "index.html")

    async def _icon(self, request: web.Request) -> web.StreamResponse:
        return self._answer(request, "icon.svg")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if not name:
            raise web.HTTPPermanentRedirect(PAGE_PATH)
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str) -> web.StreamResponse:
        if self._files is None:
            self._files = _read_files()
        file = self._files.get(name)
        if file is None:
            raise web.HTTPNotFound
        headers = {**SECURITY_HEADERS, "ETag": file.etag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == file.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=file.body, content_type=file.type, charset="utf-8", headers=headers
        )


def _read_files() -> dict[str, _File]:
    found: dict[str, _File] = {}
    for entry in files("mlx_isolate_supervisor").joinpath("ui").iterdir():
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            body = entry.read_bytes()
            etag = '"' + hashlib.sha256(body).hexdigest()[:20] + '"'
            found[entry.name] = _File(body, kind, etag)
    return found
