"""Hostile bytes to typed structs: every fault of a request body is a RequestError with its field.

A request's shape is a msgspec Struct: types, ranges and enumerations stand in its annotations, null
and absent are both None, unknown fields are skipped without being built. A duplicate key counts by
its last value. Knows nothing of what the fields mean.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from mlx_isolate_shared.errors import RequestError

# Nesting of free-form values (tool schemas, template arguments): templates and schema compilers
# recurse over them.
FREE_FORM_DEPTH_MAX = 48
# Values in one free-form field.
FREE_FORM_NODES_MAX = 200_000
# Lists, objects and fields of a whole body, brackets and colons in its texts counted like them; far
# more than any context holds. A body of empty lists takes forty times its size once it is built,
# and while that goes on no other thread runs, so that 64 MiB of them would be taken for a hang.
PARTS_MAX = 2_000_000

T = TypeVar("T")

_PLACE = re.compile(r"^(?P<text>.*) - at (?P<key>`key` in )?`(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_OFFSET = re.compile(r"\(byte (\d+)\)$")
_NOT_FINITE = re.compile(rb'"([A-Za-z_]\w*)"\s*:\s*-?$')


@functools.cache
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)


def decode_body(body: bytes, shape: type[T]) -> T:
    """Decode a JSON request body into `shape`.

    Raises:
        RequestError: it is no JSON, no object, nested too deeply, or a field has a wrong type or
            range; then `param` names the field.
    """
    try:
        value: T = _decoder(cast(Any, shape)).decode(body)
        return value
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except msgspec.DecodeError as error:
        raise _syntax_error(body, str(error)) from error
    except UnicodeDecodeError as error:
        raise RequestError("The request body is not valid UTF-8.") from error
    except RecursionError as error:
        raise RequestError("The request body is nested too deeply.") from error


def check_parts(body: bytes) -> None:
    """Refuse a body that could hold too many lists, objects and fields, before any is built.

    Raises:
        RequestError: it could.
    """
    if len(body) > PARTS_MAX and sum(map(body.count, (b"[", b"{", b":"))) > PARTS_MAX:
        raise RequestError("The request body has too many lists, objects and fields.")


def check_free_form(value: Any, param: str) -> None:
    """Refuse a free-form value that is nested too deeply or has too many parts.

    Raises:
        RequestError: naming `param`.
    """
    level: list[Any] = [value]
    nodes = 0
    for _ in range(FREE_FORM_DEPTH_MAX):
        inner: list[Any] = []
        for item in level:
            if not isinstance(item, (dict, list)):
                continue
            nodes += len(item)
            if nodes > FREE_FORM_NODES_MAX:
                raise RequestError(f"'{param}' has too many parts.", param=param)
            inner.extend(item.values() if isinstance(item, dict) else item)
        if not inner:
            return
        level = inner
    raise RequestError(
        f"'{param}' is nested more than {FREE_FORM_DEPTH_MAX} levels deep.", param=param
    )


def filter_fields(body: bytes, strip: Sequence[str], replace: dict[str, Any]) -> bytes:
    """The body without the fields in `strip` and with those of `replace`, as configured.

    Raises:
        RequestError: the body is not a JSON object.
    """
    if not strip and not replace:
        return body
    fields = decode_body(body, dict[str, msgspec.Raw])
    for name in strip:
        fields.pop(name, None)
    return msgspec.json.encode({**fields, **replace})


def _field_error(text: str) -> RequestError:
    place = _PLACE.match(text)
    path = ""
    if place is not None:
        text = place["text"]
        path = place["path"].removeprefix("$").removeprefix(".")
        if place["key"]:
            text = f"key: {text}"
    missing = _MISSING.match(text)
    if missing is not None:
        path = f"{path}.{missing['name']}".removeprefix(".")
        text = "is required"
    text = text.replace(" | null", "").replace("int | float", "number")
    text = text[:1].lower() + text[1:]
    if not path:
        return RequestError(f"The request body is not as it should be: {text}.")
    return RequestError(f"Invalid value for '{path}': {text}.", param=path)


def _syntax_error(body: bytes, text: str) -> RequestError:
    offset = _OFFSET.search(text)
    if offset is not None:
        at = int(offset[1])
        # The one malformed number that a JSON library writes by itself; name its field.
        if body[at : at + 3] in (b"NaN", b"Inf"):
            field = _NOT_FINITE.search(body[max(0, at - 200) : at])
            if field is not None:
                param = field[1].decode()
                return RequestError(
                    f"Invalid value for '{param}': a JSON number must be finite.", param=param
                )
    return RequestError(f"The request body is not valid JSON: {text}.", code="invalid_json")
