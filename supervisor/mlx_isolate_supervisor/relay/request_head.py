"""The head of a request as an engine gets it: the client's end-to-end headers, framed anew."""

import functools

from aiohttp import HttpVersion11, web

from mlx_isolate_supervisor.relay.answer_head import HOP_BY_HOP

# Besides hop-by-hop headers an engine does not get: how the body was framed for us; what would
# make it compress; the client's secrets; what only the supervisor answers to.
_DROPPED = frozenset(
    name.encode()
    for name in (
        *HOP_BY_HOP,
        "accept-encoding",
        "authorization",
        "content-encoding",
        "content-length",
        "cookie",
        "expect",
        "host",
        "origin",
        "x-api-key",
        "x-request-id",
    )
)


# Methods whose requests have a length even where they have no body.
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


def asks_for_websocket(request: web.Request) -> bool:
    """Whether a request would change its connection into a WebSocket; other upgrades are dropped.

    (An upgrade to HTTP/2, say, would carry requests past every check.)
    """
    return (
        "Upgrade" in request.headers
        and request.method == "GET"
        and request.version >= HttpVersion11
        and request.headers["Upgrade"].strip().lower() == "websocket"
        and "upgrade" in _connection_tokens(request)
    )


def request_head(request: web.Request, engine_path: str, request_id: str, body_bytes: int) -> bytes:
    """Request line and headers with the closing blank line; the query is kept as it came."""
    query = request.rel_url.raw_query_string
    target = f"{engine_path}?{query}" if query else engine_path
    # Bytes that are no UTF-8 come as surrogates.
    named = frozenset(
        token.encode("utf-8", "surrogateescape") for token in _connection_tokens(request)
    )
    lines = [
        f"{request.method} {target} HTTP/1.1".encode(),
        b"Host: engine",
        b"x-request-id: " + request_id.encode(),
    ]
    if body_bytes or request.method in _BODY_METHODS:
        lines.append(b"Content-Length: %d" % body_bytes)
    if asks_for_websocket(request):
        lines += [b"Connection: Upgrade", b"Upgrade: websocket"]
    for name, value in request.raw_headers:
        lowered = name.lower()
        if lowered not in _DROPPED and lowered not in named:
            lines.append(name + b": " + value)
    lines += [b"", b""]
    return b"\r\n".join(lines)


def _connection_tokens(request: web.Request) -> frozenset[str]:
    values = request.headers.getall("Connection", ())
    return _split_tokens(",".join(values)) if values else frozenset()


@functools.lru_cache(maxsize=64)
def _split_tokens(value: str) -> frozenset[str]:
    return frozenset(token.strip().lower() for token in value.split(","))
