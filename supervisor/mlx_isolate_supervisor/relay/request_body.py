"""A request's body: read whole within its limits, and the few fields that are read from it."""

import asyncio
import re
from typing import Self

import msgspec
from aiohttp import HttpVersion11, web

from mlx_isolate_shared.errors import CapacityError, RequestError
from mlx_isolate_supervisor.models.idle import asked_idle_s
from mlx_isolate_supervisor.relay.limits import RelayLimits


class RoutingFields(msgspec.Struct, frozen=True):
    """What the supervisor reads of a body; every other field is the engine's to judge."""

    model: str | None = None
    stream: bool | None = None
    keep_alive: str | int | float | None = None
    ttl: int | float | None = None


_FIELDS = msgspec.json.Decoder(RoutingFields)
_EXPECTED = {
    "model": "a string",
    "stream": "true or false",
    "keep_alive": 'a duration such as "5m" or a number of seconds',
    "ttl": "a number of seconds",
}
_AT_FIELD = re.compile(r"`\$\.(\w+)`")


def read_routing(body: bytes) -> RoutingFields:
    """The routing fields of a JSON body.

    Raises:
        RequestError: 400; no JSON object, or one of the fields has a wrong type (`param`).
    """
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        match = _AT_FIELD.search(str(error))
        if match is None or match[1] not in _EXPECTED:
            raise RequestError("The body must be a JSON object.", code="invalid_json") from error
        field = match[1]
        raise RequestError(
            f"{field} must be {_EXPECTED[field]}.", code="invalid_type", param=field
        ) from error
    except msgspec.DecodeError as error:
        reason = str(error).rstrip(".") if body else "it is empty"
        raise RequestError(f"The body is not valid JSON: {reason}.", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from error


def read_idle_s(fields: RoutingFields) -> float | None:
    """Seconds of idleness that the request asks the model to outlive; None if it says nothing.

    Raises:
        RequestError: 400; `keep_alive` or `ttl` is no duration.
    """
    try:
        return asked_idle_s(fields.keep_alive, fields.ttl)
    except ValueError as error:
        name = "ttl" if fields.keep_alive is None else "keep_alive"
        raise RequestError(f"{name} {error}.", param=name) from None


class BodyHold:
    """The bytes that one request counts against the budget of all bodies.

    As a context manager, it is released at the end in any case.
    """

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._held = 0

    def add(self, size: int) -> None:
        """Count `size` more bytes.

        Raises:
            CapacityError: 429; the waiting bodies of all requests fill the budget.
        """
        if self._budget.held + size > self._budget.bytes_max:
            raise CapacityError(
                "Too many request bodies are waiting; try again.",
                status=429,
                code="queue_full",
                retry_after_s=1.0,
            )
        self._budget.held += size
        self._held += size

    def release(self) -> None:
        """Count nothing any more; may be called again."""
        self._budget.held -= self._held
        self._held = 0

    def __enter__(self) -> Self:
        """Nothing is held yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.release()


class BodyBudget:
    """How many bytes of bodies are held, of how many that may be.

    Attributes:
        held: bytes of bodies that no engine has answered to yet.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def hold(self) -> BodyHold:
        """A hold on nothing yet."""
        return BodyHold(self)


def check_head(request: web.Request, limits: RelayLimits) -> None:
    """Refuse, before a byte of body is read, what its head already rules out.

    Raises:
        RequestError: 413 too large by its own account; 415 compressed.
    """
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            f"Request bodies must not be compressed ({encoding}).",
            status=415,
            code="unsupported_encoding",
        )
    if (request.content_length or 0) > limits.body_bytes_max:
        raise too_large(limits)


def too_large(limits: RelayLimits) -> RequestError:
    """The error for a body above the limit."""
    return RequestError(
        f"The request body is larger than {limits.body_bytes_max} bytes.",
        status=413,
        code="body_too_large",
    )


async def read_body(request: web.Request, limits: RelayLimits, hold: BodyHold) -> bytes:
    """The whole body, after the `100 Continue` that its sender may be waiting for.

    Raises:
        RequestError: 413 above the limit, 408 too slow, 400 broken framing.
        CapacityError: 429 the budget of all bodies is used up.
        ConnectionError: the client has gone.
    """
    if "Expect" in request.headers and request.version >= HttpVersion11:
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if request.content.is_eof():
        # The usual body came whole with its head; a deadline would cost more than reading it.
        body = request.content.read_nowait()
        if len(body) > limits.body_bytes_max:
            raise too_large(limits)
        hold.add(len(body))
        return body
    try:
        return await _collect(request, limits, hold)
    except TimeoutError as error:
        raise RequestError(
            "The request body did not arrive in time.", status=408, code="body_timeout"
        ) from error
    except web.RequestPayloadError as error:
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the client has gone") from error
        raise RequestError("The request body is not framed rightly.", code="bad_http") from error


async def _collect(request: web.Request, limits: RelayLimits, hold: BodyHold) -> bytes:
    loop = asyncio.get_running_loop()
    end = loop.time() + limits.body_total_s
    parts: list[bytes] = []
    size = 0
    async with asyncio.timeout(limits.body_idle_s) as deadline:
        while part := await request.content.readany():
            size += len(part)
            if size > limits.body_bytes_max:
                raise too_large(limits)
            hold.add(len(part))
            parts.append(part)
            deadline.reschedule(min(loop.time() + limits.body_idle_s, end))
    return parts[0] if len(parts) == 1 else b"".join(parts)
