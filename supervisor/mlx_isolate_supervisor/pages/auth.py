"""API keys: who may call, decided in constant time before anything is read."""

import hashlib
import hmac
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from mlx_isolate_shared.errors import RequestError

# Probes of monitors and service managers carry no key and learn nothing but up or down.
# The page's own files hold no secrets; what it shows is fetched with a key that it asks for.
OPEN_PATHS = frozenset({"/", "/favicon.ico", "/health", "/livez", "/readyz", "/ui"})
OPEN_FOLDER = "/ui/"


class KeyRing:
    """The keys that open this server; only their digests are kept.

    Args:
        keys: any of them is right; none = no key is needed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @property
    def is_asked(self) -> bool:
        """Whether any key is needed."""
        return bool(self._digests)

    def accepts(self, authorization: str | None, x_api_key: str | None) -> bool:
        """Whether a request with these headers may pass.

        Every offered key is compared with every known one, whatever matched before, so that the
        time tells nothing.
        """
        if not self._digests:
            return True
        offered = [x_api_key] if x_api_key is not None else []
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() == "bearer":
            offered.append(token.strip())
        matches = [
            hmac.compare_digest(_digest(key), digest) for key in offered for digest in self._digests
        ]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyGuard:
    """Middleware that lets in who has a key; its keys can be changed while it runs.

    Args:
        keys: any of them is right; none = no key is needed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.ring = KeyRing(keys)

    def install(self, app: web.Application) -> None:
        """Guard every path of `app` but the probes; call after the edge has been installed."""
        app.middlewares.append(self._check)

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        headers = request.headers
        if not self.ring.is_asked:
            return await handler(request)
        is_open = request.path in OPEN_PATHS or request.path.startswith(OPEN_FOLDER)
        if not is_open and not self.ring.accepts(
            headers.get("Authorization"), headers.get("x-api-key")
        ):
            raise RequestError(
                "A valid API key is needed, as a bearer token or in x-api-key.",
                status=401,
                code="invalid_api_key",
                type="authentication_error",
            )
        return await handler(request)
