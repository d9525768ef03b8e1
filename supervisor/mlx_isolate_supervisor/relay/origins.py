"""Which browser origins may call, and the CORS headers that say so; pure."""

import functools
import ipaddress
from urllib.parse import urlsplit

import msgspec

Headers = tuple[tuple[str, str], ...]

ANY_ORIGIN = "*"
LOOPBACK_ORIGINS = "loopback"

_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = "x-request-id, Retry-After"
_PREFLIGHT_AGE_S = "600"


@functools.lru_cache(maxsize=256)
def is_loopback_host(host: str) -> bool:
    """Whether `host` (no port, no brackets) names this machine's loopback interface."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class OriginPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a browser's question whether a page may call.

    Attributes:
        allowed: origins such as `https://chat.example`; `loopback` stands for any origin on a
            loopback host, `*` for all. Empty switches CORS off.
    """

    allowed: tuple[str, ...] = (LOOPBACK_ORIGINS,)

    def allows(self, origin: str) -> bool:
        """Whether a page from `origin` may read answers."""
        if ANY_ORIGIN in self.allowed or origin in self.allowed:
            return True
        return LOOPBACK_ORIGINS in self.allowed and _is_loopback_origin(origin)

    def answer_headers(self, origin: str | None) -> Headers:
        """CORS headers of any answer: exactly one Access-Control-Allow-Origin, or none."""
        if ANY_ORIGIN in self.allowed:
            return (
                ("Access-Control-Allow-Origin", "*"),
                ("Access-Control-Expose-Headers", _EXPOSED),
            )
        if not self.allowed or origin is None or not self.allows(origin):
            return ()
        return (
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", _EXPOSED),
            ("Vary", "Origin"),
        )

    def preflight_headers(self, asked_headers: str | None, private_network: bool) -> Headers:
        """What a preflight from an allowed origin gets besides `answer_headers`."""
        headers = [
            ("Access-Control-Allow-Methods", _METHODS),
            ("Access-Control-Allow-Headers", asked_headers or ANY_ORIGIN),
            ("Access-Control-Max-Age", _PREFLIGHT_AGE_S),
        ]
        if private_network:
            headers.append(("Access-Control-Allow-Private-Network", "true"))
        return tuple(headers)

    def is_forged(self, origin: str | None, host: str | None, content_type: str) -> bool:
        """Whether a changing request may be a page's blind post.

        A browser sends text and form bodies to any server without asking first, so a page that
        may not read our answers could still start work. A JSON body from a foreign page needs a
        preflight, which fails; so only what needs none is refused here.

        Args:
            content_type: of its body; "" refuses it whatever the body is.
        """
        if origin is None or self.allows(origin):
            return False
        if host is not None and _netloc(origin) == host.lower():
            return False
        return content_type.partition(";")[0].strip().lower() != "application/json"


def _netloc(origin: str) -> str | None:
    """Host and port of an origin in lower case; None where it is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _is_loopback_origin(origin: str) -> bool:
    # No browser sends other letters, and the origin goes back into the answer's head.
    if not origin.isascii():
        return False
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    return host is not None and is_loopback_host(host)
