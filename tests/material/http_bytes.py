"""Bytes that a hostile client sends to an HTTP port: good requests, changed at random; seeded."""

import json
import random

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}).encode()
STREAM = json.dumps(
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
).encode()


def request(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    """A whole request; the length of a body is told unless the headers say something of it."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body and not any("ength" in line or "ncoding" in line for line in headers):
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(body: bytes, size: int = 7, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """A body in chunks."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    return chunks + b"0\r\n" + trailer + b"\r\n"


CODED = "Transfer-Encoding: chunked"
GOOD = (
    request("GET", "/health"),
    request("GET", "/v1/models"),
    request("GET", "/status?x=%41"),
    request("GET", "/ui/"),
    request("GET", "/v1/responses/resp_1"),
    request("HEAD", "/livez"),
    request("OPTIONS", CHAT, "Origin: http://localhost", "Access-Control-Request-Method: POST"),
    request("POST", CHAT, body=BODY),
    request("POST", CHAT, body=STREAM),
    request("POST", CHAT, CODED, body=chunked(BODY)),
    request("POST", CHAT, CODED, body=chunked(BODY, 1, b";a=b", b"X-T: 1\r\n")),
    request("POST", "/v1/messages", "Expect: 100-continue", body=BODY),
    request("GET", "/upstream/m/v1/models"),
    request(
        *("GET", "/v1/realtime", "Connection: Upgrade", "Upgrade: websocket"),
        *("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="),
    ),
)
HEADERS = (
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 0x5"),
    *(b"Content-Length: 5, 5", b"Content-Length: 5 6", b"Content-Length: 99999999999999999999"),
    *(b"Content-Length:", b"Content-Length : 5", b" Content-Length: 5", b"content-length: 4"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked, identity"),
    *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding"),
    *(b"Transfer-Encoding: gzip, chunked", b"TE: trailers", b"Connection: Content-Length"),
    *(b"Connection: close", b"Connection: Upgrade", b"Upgrade: h2c", b"Expect: 200-maybe"),
    *(b"Host: evil.example", b"Host: localhost", b"Host:", b"X: a\rInjected: 1", b"X: a\x00b"),
    *(b"X: \xff\xfe", b"X" * 300 + b": 1", b": empty", b"(bad): 1", b"folded: a\r\n b"),
    *(b"X: " + b"y" * 40_000, b"X-Request-Id: a\x7fb", b"Authorization: Bearer \xe9"),
    *(b"Content-Encoding: gzip", b"Accept-Encoding: br", b"Range: bytes=0-0", b"Origin: null"),
)
PATHS = (
    *(b"/ui/../../etc/passwd", b"/ui/%2e%2e/%2e%2e/etc/passwd", b"/ui/..%2f..%2fetc%2fpasswd"),
    *(b"/upstream/m/../../status", b"/upstream/m/%0d%0aX:%201", b"/upstream/../m/v1", b"//", b"*"),
    *(b"http://evil.example/v1/models", b"/v1/models%00", b"/v1/models?" + b"a=b&" * 2000),
    *(b"/" + b"x" * 40_000, b"/%", b"/%zz", b"/\xff", b"/logs/stream/..%2f..%2fx", b"evil:80"),
    *(b"/v1/responses/..%2f..%2f..%2fetc%2fpasswd", b"/v1/models/%2e%2e%2f", b"/;/..;/", b""),
)


def random_bytes(chance: random.Random) -> bytes:
    """What one hostile connection sends: up to three requests, one behind the other."""
    data = bytearray()
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data += _changed(chance, chance.choice(GOOD))
    if chance.random() < 0.3:
        for _ in range(chance.randrange(1, 8)):
            _damage(chance, data)
    if chance.random() < 0.2:
        del data[chance.randrange(len(data) + 1) :]
    return bytes(data)


def _changed(chance: random.Random, good: bytes) -> bytes:
    head, _, body = good.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    how = chance.randrange(8)
    if how <= 2:
        for _ in range(chance.choice((1, 1, 2, 200))):
            lines.insert(chance.randrange(len(lines) + 1), chance.choice(HEADERS))
    elif how == 3:
        words = first.split(b" ")
        words[1] = chance.choice(PATHS)
        first = b" ".join(words)
    elif how == 4:
        versions = (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 x", b"HTTP/9.9", b"", b"ICY")
        first = first.rsplit(b" ", 1)[0] + b" " + chance.choice(versions)
    elif how == 5:
        methods = (b"TRACE", b"CONNECT", b"get", b"PATCH", b"X" * 3000, b"\x00", b"DELETE", b"PRI")
        first = chance.choice(methods) + b" " + first.split(b" ", 1)[1]
    elif how == 6:
        lines = lines[1:]
    end = chance.choice((b"\r\n",) * 8 + (b"\n", b"\r", b"\r\r\n"))
    return end.join([first, *lines]) + end + end + body


def _damage(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data)) if data else 0
    how = chance.randrange(5)
    if how == 0:
        data[at : at + 1] = bytes([chance.randrange(256)])
    elif how == 1:
        del data[at : at + chance.randrange(1, 30)]
    elif how == 2:
        data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
    elif how == 3:
        data[at:at] = data[: chance.randrange(0, 200)]
    else:
        data[at:at] = chance.choice(
            (b"\r\n", b"\r\n\r\n", b"\x00", b"0\r\n\r\n", b"ffffffffff\r\n")
        )
