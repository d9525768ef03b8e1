"""How a connection to an engine ends before its answer does, and what that says of the request."""

import sys


class EngineGone(Exception):
    """The connection ended before the answer did."""


class ClientGivenUp(EngineGone):
    """The engine closed the connection while its answer waited for a client that does not read."""


class RequestUnread(EngineGone):
    """The connection ended, and the engine certainly had not read the request to its end.

    So it cannot have acted on it, and another engine may get the request.
    """


def says_unread(error: Exception | None) -> bool:
    """Whether the end of a connection tells that its other end had not read all of our bytes.

    A broken pipe says that it was closed before all were written; a reset says so on Linux, where
    closing a socket with unread bytes in it makes one. Elsewhere that is not known.
    """
    return isinstance(error, BrokenPipeError) or (
        isinstance(error, ConnectionResetError) and sys.platform == "linux"
    )
