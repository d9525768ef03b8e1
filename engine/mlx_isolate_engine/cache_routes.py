"""The engine's endpoints for its prompt cache: figures, flush with evidence, clear."""

from typing import Protocol

import msgspec
from aiohttp import web

from mlx_isolate_engine.answers import JSON_HEADERS
from mlx_isolate_shared.errors import RequestError
from mlx_isolate_shared.own_thread import in_own_thread
from mlx_isolate_shared.wire import CacheFigures

# A flush that nobody gave a time: below every proxy's idle timeout.
FLUSH_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_MAX_S = 3600.0
# Name of the threads that wait for a flush, or clear.
THREAD = "cache-control"


class Evidence(Protocol):
    """What a flush can prove; a msgspec Struct."""

    @property
    def durable(self) -> bool:
        """Nothing that was dirty when the flush began is only in RAM."""
        ...


class CacheControl(Protocol):
    """A prompt cache as its operator sees it; every call from any thread, `flush` may block."""

    @property
    def has_cold_tier(self) -> bool:
        """Whether anything can be made durable."""
        ...

    def flush(self, timeout_s: float) -> Evidence:
        """Wait until what is dirty now is durable."""
        ...

    def figures(self) -> CacheFigures:
        """Both tiers in numbers."""
        ...

    def entries(self) -> list[dict[str, object]]:
        """What RAM holds."""
        ...

    def clear(self) -> int:
        """Forget every entry of both tiers; returns how many there were."""
        ...


class CacheRoutes:
    """Handlers over a prompt cache; None where it is switched off."""

    def __init__(self, cache: CacheControl | None) -> None:
        self._cache = cache

    def add_to(self, app: web.Application) -> None:
        """Register the endpoints."""
        app.router.add_post("/admin/cache/flush", self._flush)
        app.router.add_get("/v1/cache/stats", self._stats)
        app.router.add_get("/v1/cache", self._list)
        app.router.add_delete("/v1/cache", self._clear)

    def _require(self) -> CacheControl:
        if self._cache is None:
            raise RequestError(
                "The prompt cache is switched off (--prompt-cache-size 0).",
                status=409,
                code="cache_disabled",
            )
        return self._cache

    async def _flush(self, request: web.Request) -> web.Response:
        cache = self._require()
        if not cache.has_cold_tier:
            raise RequestError(
                "There is no SSD tier to flush to (--ssd-cache-dir).",
                status=409,
                code="ssd_cache_disabled",
            )
        timeout_s = _timeout_s(request.query.get("timeout_s"))
        evidence = await in_own_thread(lambda: cache.flush(timeout_s), THREAD)
        return _json(evidence, status=200 if evidence.durable else 503)

    async def _stats(self, request: web.Request) -> web.Response:
        figures = self._cache.figures() if self._cache is not None else CacheFigures()
        return _json(figures)

    async def _list(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": self._cache.entries() if self._cache else []})

    async def _clear(self, request: web.Request) -> web.Response:
        cleared = await in_own_thread(self._require().clear, THREAD)
        return _json({"cleared": cleared})


def _timeout_s(text: str | None) -> float:
    if text is None:
        return FLUSH_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= FLUSH_TIMEOUT_MAX_S:
        raise RequestError(
            f"timeout_s must be a number of seconds from 0 to {FLUSH_TIMEOUT_MAX_S:.0f}.",
            param="timeout_s",
        )
    return value


def _json(payload: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), headers=JSON_HEADERS, status=status)
