"""From JSON schemas and tools to the grammar of an answer, in llguidance's terms; pure."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

# Whitespace between the parts of JSON: some, so that a model may write it as it likes, and not
# any amount, which a confused model would fill its whole answer with.
WHITESPACE = r"[ \n\t]{0,16}"
# The formats of strings that llguidance enforces. Any other one only describes, as JSON schema has
# it by default, and would be refused: uint32, binary, path and the like, which generators write.
ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname"}
    | {"ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# Keywords that only describe: they would count against the longest grammar, and tools explain much.
_DESCRIBING = frozenset({"description", "title", "$comment", "examples", "example", "default"})
# Keywords of a schema whose value is data, and those whose value is schemas by name.
_DATA = frozenset({"const", "enum", "required", "x-guidance", *_DESCRIBING})
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)

Change = Callable[[dict[str, Any]], dict[str, Any]]


class Marker(NamedTuple):
    """What begins or ends a tool call: its text, and its token if that has no text of its own."""

    text: str
    special_token: int | None = None


def json_answer(schema: dict[str, Any], *, strict: bool = True) -> str:
    """The grammar of an answer that is JSON of a schema.

    Args:
        schema: a JSON schema.
        strict: refuse what cannot be enforced; otherwise it is passed over.
    """
    return LLMatcher.grammar_from_json_schema(_json(schema, strict=strict))


def json_answer_or_calls(
    schema: dict[str, Any],
    opening: Marker,
    closing: Marker,
    *,
    strict: bool = True,
    functions: Sequence[dict[str, Any]] = (),
) -> str:
    """The grammar of an answer that is JSON of a schema or, instead, calls of tools.

    Whether to call, and how, is left to the model. A family without a closing marker calls to the
    end of its answer.

    Args:
        functions: those that may be called, where one of them is strict and the family writes calls
            as JSON; otherwise a call is as free within its markers as without a schema.
    """
    return (
        "start: answer | calls\n"
        f"answer: %json {_json(schema, strict=strict)}\n"
        "calls: call (/[ \\n]{1,4}/? call)*\n"
        f"call: {_literal(opening)} body\n"
        f"{_held_body(functions, closing, forced=False) if functions else _free_body(closing)}\n"
    )


def forced_call(functions: Sequence[dict[str, Any]], opening: Marker, closing: Marker) -> str:
    """The grammar of one call of one of `functions`, which the family writes as JSON.

    A function that is not declared strict gets arguments of its schema as far as that can be
    enforced.
    """
    return f"start: {_literal(opening)} body\n{_held_body(functions, closing, forced=True)}\n"


def begun_call(functions: Sequence[dict[str, Any]], closing: Marker) -> str:
    """The grammar of what follows the opening marker of a call that the model begins by itself.

    Arguments of a function that is not declared strict may be any object.
    """
    return f"start: body\n{_held_body(functions, closing, forced=False)}\n"


def _json(schema: dict[str, Any], *, strict: bool) -> str:
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict}
    return json.dumps({**_enforceable(schema), "x-guidance": options})


def _literal(marker: Marker) -> str:
    token = marker.special_token
    return json.dumps(marker.text) if token is None else f"<[{token}]>"


def _held_body(functions: Sequence[dict[str, Any]], closing: Marker, *, forced: bool) -> str:
    names = [f"call_{place}" for place in range(len(functions))]
    rules = [f'body: "\\n"? ({" | ".join(names)}) "\\n"? {_literal(closing)}']
    for name, function in zip(names, functions, strict=True):
        strict = bool(function.get("strict"))
        parameters = (function.get("parameters") or {}) if strict or forced else {}
        schema = _call_schema(function.get("name"), parameters)
        rules.append(f"{name}: %json {_json(schema, strict=strict)}")
    return "\n".join(rules)


def _free_body(closing: Marker) -> str:
    if not closing.text:
        return "body: /(?s:.*)/"
    if closing.special_token is not None:
        return f"body: /(?s:.*)/ {_literal(closing)}"
    end = re.escape(closing.text).replace("/", "\\/")
    return f"body[lazy]: /(?s:.*){end}/"


def _call_schema(name: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    # Arguments are an object also where a schema does not say so.
    parameters = {"type": "object", **parameters}
    if "$id" not in parameters:
        parameters = _moved(parameters, "#/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A schema that lies at `place` of a larger one: what it refers to has moved with it."""
    moved = _mapped(schema, lambda inner: _moved(inner, place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def _enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without what only describes."""
    kept = {key: value for key, value in schema.items() if key not in _DESCRIBING}
    plain = _mapped(kept, _enforceable)
    form = plain.get("format")
    if isinstance(form, str) and form not in ENFORCED_FORMATS:
        del plain["format"]
    return plain


def _mapped(schema: dict[str, Any], change: Change) -> dict[str, Any]:
    """A copy of a schema with `change` made to each schema right below it."""
    return {
        key: value
        if key in _DATA
        else dict(_named(value, change))
        if key in _BY_NAME and isinstance(value, dict)
        else _each(value, change)
        for key, value in schema.items()
    }


def _named(schemas: dict[str, Any], change: Change) -> Iterator[tuple[str, Any]]:
    for name, schema in schemas.items():
        yield name, _each(schema, change)


def _each(value: Any, change: Change) -> Any:
    if isinstance(value, dict):
        return change(value)
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return value
