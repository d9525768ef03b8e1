"""A request's task that somebody has cancelled: what its client is told, if it is still there."""

import asyncio

from aiohttp import web

from mlx_isolate_shared.errors import CapacityError, HttpError
from mlx_isolate_supervisor.relay.exchange import CANCELLED_BY_OPERATOR


def take_cancellation(request: web.Request, error: asyncio.CancelledError) -> HttpError:
    """What to tell a client whose request was cancelled by somebody else.

    Raises:
        CancelledError: the client itself has gone; there is nobody to tell.
    """
    if request.transport is None or request.transport.is_closing():
        raise error
    uncancel()
    if error.args == (CANCELLED_BY_OPERATOR,):
        return HttpError(
            "The request was cancelled by the operator.",
            status=499,
            type="server_error",
            code="request_cancelled",
        )
    return CapacityError(
        "The server is shutting down.", status=503, code="shutting_down", retry_after_s=5.0
    )


def uncancel() -> None:
    """Take a cancellation of the running task for dealt with."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
