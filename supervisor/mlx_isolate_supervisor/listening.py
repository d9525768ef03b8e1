"""The TCP sockets of the daemon: bound before anything else starts, never elsewhere than asked."""

import errno
import socket
from collections.abc import Sequence

from mlx_isolate_shared.errors import ConfigError

# Connections that wait to be accepted; without enough of them a burst is refused by the system.
BACKLOG = 1024
# What stands for every address of this machine, and the one of them that it can always ask.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class PortTakenError(ConfigError):
    """Another process listens there."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of `host`, all on one port.

    Port 0 takes a free one. The sockets listen at once, so that two daemons cannot both
    believe that they have the port.

    Raises:
        PortTakenError: another process has it.
        ConfigError: the address is not one of this machine's, or not allowed.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: {host!r} is no address of this machine.") from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, _, _, address in dict.fromkeys(found):
            place = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
            sockets.append(_listen(family, kind, place))
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise _explain(error, host, port) from error
    return sockets


def _listen(
    family: socket.AddressFamily, kind: socket.SocketKind, place: tuple[object, ...]
) -> socket.socket:
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _explain(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"port {port} on {host} is in use by another process; stop it or choose another --port."
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} is not allowed for this user; choose one above 1023.")
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}.")


def url_of(host: str, port: int) -> str:
    """How what is bound to `host`, a name or an address, is opened on this machine."""
    address = _WILDCARDS.get(host, host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def urls_of(sockets: Sequence[socket.socket]) -> list[str]:
    """The addresses as a person on this machine opens them."""
    return [url_of(*listener.getsockname()[:2]) for listener in sockets]


def wildcards_of(sockets: Sequence[socket.socket]) -> list[str]:
    """`0.0.0.0` and `::`, where the sockets are reached by every address of this machine."""
    bound = (listener.getsockname()[0] for listener in sockets)
    return [address for address in bound if address in _WILDCARDS]
