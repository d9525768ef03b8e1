"""What a request to one of the supervisor's own endpoints asks for: numbers, a model, a time.

Whatever stands there instead is the caller's fault and is told so; none of it is a fault of ours.
"""

import re
from typing import Any

import msgspec
from aiohttp import web

from mlx_isolate_shared.errors import RequestError

# A control request names a model and little else.
CONTROL_BODY_BYTES_MAX = 64 * 1024
# Without it a caller could hold a connection to every engine for days.
TIMEOUT_S_MAX = 3600.0
# Digits as `int` takes them at once: neither another script's nor thousands of them.
_WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a control request asks for.

    Attributes:
        model: as it is called there; None = none is named.
        timeout_s: how long to wait, as it stands there: for `seconds`, where a time is taken.
    """

    model: str | None = None
    timeout_s: Any = None


def whole_number(request: web.Request, name: str, default: int, most: int) -> int:
    """The whole number `?name=`, at most `most`; `default` where it is missing or empty.

    Raises:
        RequestError: 400; it is no whole number.
    """
    text = request.query.get(name, "")
    if not text:
        return default
    if _WHOLE_NUMBER.fullmatch(text) is None:
        raise RequestError(f"{name} must be a whole number of up to 18 digits.", param=name)
    return min(int(text), most)


def seconds(given: object, default_s: float) -> float:
    """`given` as a time of up to TIMEOUT_S_MAX seconds; `default_s` where it is None.

    Raises:
        RequestError: 400; it is no such number.
    """
    if given is None:
        return default_s
    is_truth = isinstance(given, bool)
    if isinstance(given, int | float) and not is_truth and 0 <= given <= TIMEOUT_S_MAX:
        return float(given)
    raise RequestError(
        f"timeout_s must be a number of seconds from 0 to {TIMEOUT_S_MAX:.0f}.", param="timeout_s"
    )


def query_timeout(request: web.Request) -> float | str | None:
    """`?timeout_s=` for `seconds`: a number where it is one."""
    text = request.query.get("timeout_s")
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


async def asked_model(request: web.Request) -> str:
    """The model that the JSON body of a control request names, as it is called there.

    Raises:
        RequestError: 400, it names none; 413.
    """
    model = _decode(await _read(request)).model
    if model is None:
        raise _no_control()
    return model


async def asked_of_all(request: web.Request) -> Asked:
    """What is asked of one model or of all: each field by the JSON body, else by the query.

    Raises:
        RequestError: 400, there is a body that is no JSON object; 413.
    """
    body = await _read(request)
    asked = _decode(body) if body else Asked()
    return Asked(
        model=request.query.get("model") if asked.model is None else asked.model,
        timeout_s=query_timeout(request) if asked.timeout_s is None else asked.timeout_s,
    )


async def _read(request: web.Request) -> bytes:
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > CONTROL_BODY_BYTES_MAX:
            raise RequestError("The body is too large.", status=413, code="body_too_large")
    return bytes(body)


def _decode(body: bytes) -> Asked:
    try:
        return msgspec.json.decode(body, type=Asked)
    except (msgspec.DecodeError, RecursionError):
        raise _no_control() from None


def _no_control() -> RequestError:
    return RequestError('The body must be JSON such as {"model": "…"}.', param="model")
