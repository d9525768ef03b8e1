"""Which Host names a request may carry: the defence of a loopback server against DNS rebinding."""

import functools

import msgspec

from mlx_isolate_supervisor.relay.origins import is_loopback_host

ANY_HOST = "*"
# A name of the DNS with a port; nothing longer is right, or worth remembering.
_NAME_LENGTH_MAX = 260


class HostPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Refuses foreign Host names while the server is bound to loopback.

    A page whose name is rebound to 127.0.0.1 reaches a loopback server as same-origin; its Host
    header still carries the page's name. A server bound to another address is reached by names
    that it cannot know, so there the check is off.

    Attributes:
        bound_host: the address or name that the server was told to bind.
        allowed: further names that are right; `*` switches the check off.
    """

    bound_host: str
    allowed: tuple[str, ...] = ()

    @property
    def is_checking(self) -> bool:
        """Whether Host names are looked at."""
        return ANY_HOST not in self.allowed and is_loopback_host(self.bound_host)

    def allows(self, host_header: str | None) -> bool:
        """Whether a request with this Host header (None: HTTP/1.0 without one) is served."""
        if host_header is None:
            return True
        if len(host_header) > _NAME_LENGTH_MAX:
            return not self.is_checking
        return _allows(self, host_header)


@functools.lru_cache(maxsize=256)
def _allows(policy: HostPolicy, host_header: str) -> bool:
    """Remembered, since nearly every request carries the same name."""
    if not policy.is_checking:
        return True
    host = _without_port(host_header).rstrip(".").lower()
    if host == policy.bound_host.lower() or is_loopback_host(host):
        return True
    return any(host == name.lower() for name in policy.allowed)


def _without_port(host_header: str) -> str:
    host = host_header.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host
