"""The head of a request as an engine gets it: the client's end-to-end headers, framed anew."""

from aiohttp import web

from mlx_isolate_supervisor.relay.framing import HOP_BY_HOP

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


def request_head(request: web.Request, engine_path: str, request_id: str, body_bytes: int) -> bytes:
    """Request line and headers with the closing blank line; the query is kept as it came."""
    query = request.rel_url.raw_query_string
    target = f"{engine_path}?{query}" if query else engine_path
    connection = request.headers.get("Connection", "")
    named = {token.strip().lower().encode() for token in connection.split(",")}
    lines = [
        f"POST {target} HTTP/1.1".encode(),
        b"Host: engine",
        b"Content-Length: %d" % body_bytes,
        b"x-request-id: " + request_id.encode(),
    ]
    for name, value in request.raw_headers:
        lowered = name.lower()
        if lowered not in _DROPPED and lowered not in named:
            lines.append(name + b": " + value)
    lines += [b"", b""]
    return b"\r\n".join(lines)
