"""What a request to one of the supervisor's own endpoints asks for: a whole number, a model.

Whatever stands there instead is the caller's fault and is told so; none of it is a fault of ours.
"""

import re

import msgspec
from aiohttp import web

from mlx_isolate_shared.errors import RequestError

# A control request names a model and little else.
CONTROL_BODY_BYTES_MAX = 64 * 1024
# Digits as `int` takes them at once: neither another script's nor thousands of them.
_WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")


class _Control(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a control request."""

    model: str | None = None


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


async def asked_model(request: web.Request) -> str:
    """The model that the JSON body of a control request names, as it is called there.

    Raises:
        RequestError: 400, it names none; 413.
    """
    model = _decode(await _read(request)).model
    if model is None:
        raise _no_control()
    return model


async def asked_model_or_all(request: web.Request) -> str | None:
    """The model that a request is about: by its JSON body, else by `?model=`; None = all models.

    Raises:
        RequestError: 400, there is a body that is no JSON object; 413.
    """
    body = await _read(request)
    model = _decode(body).model if body else None
    return request.query.get("model") if model is None else model


async def _read(request: web.Request) -> bytes:
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > CONTROL_BODY_BYTES_MAX:
            raise RequestError("The body is too large.", status=413, code="body_too_large")
    return bytes(body)


def _decode(body: bytes) -> _Control:
    try:
        return msgspec.json.decode(body, type=_Control)
    except (msgspec.DecodeError, RecursionError):
        raise _no_control() from None


def _no_control() -> RequestError:
    return RequestError('The body must be JSON such as {"model": "…"}.', param="model")
