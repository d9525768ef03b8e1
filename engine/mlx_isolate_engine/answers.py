"""Plain HTTP answers: JSON bodies, and every error as JSON in its protocol's form."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from mlx_isolate_shared.errors import EngineError, HttpError, RequestError

log = logging.getLogger("engine.server")

JSON_HEADERS = {"Content-Type": "application/json"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorBody = Callable[[HttpError], bytes]


def internal_error() -> EngineError:
    """What clients are told of a fault that nobody foresaw."""
    return EngineError("The engine failed to answer.", status=500, code="internal_error")


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as JSON; what nobody foresaw is a 500 that says nothing of our insides."""
    try:
        return await handler(request)
    except HttpError as error:
        return error_response(error, HttpError.body, {})
    except web.HTTPException as error:
        return error_response(_from_aiohttp(error), HttpError.body, _allow(error))
    except ConnectionError:
        # The client is gone, which is no error of ours: end as aiohttp's own cancellation does.
        raise asyncio.CancelledError from None
    except Exception:
        log.exception(
            "request.failed request=%s path=%s", request.headers.get("x-request-id"), request.path
        )
        return error_response(internal_error(), HttpError.body, {})


def _from_aiohttp(error: web.HTTPException) -> HttpError:
    messages = {404: "There is no such endpoint.", 405: "This endpoint does not take that method."}
    message = messages.get(error.status, error.reason)
    return RequestError(message, status=error.status, code=error.reason.lower().replace(" ", "_"))


def _allow(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def error_response(
    error: HttpError, error_body: ErrorBody, headers: dict[str, str]
) -> web.Response:
    """An error as its status, headers and body."""
    return web.Response(
        status=error.status,
        body=error_body(error),
        headers={**JSON_HEADERS, **headers, **error.headers()},
    )


def json_response(payload: object) -> web.Response:
    """Any payload as JSON."""
    return web.Response(body=msgspec.json.encode(payload), headers=JSON_HEADERS)


def too_large(limit: int) -> RequestError:
    """A body over the limit, in bytes."""
    return RequestError(
        f"The request body is larger than {limit} bytes.", status=413, code="body_too_large"
    )
