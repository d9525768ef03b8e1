"""Schemas, and tools that are declared with them."""

from typing import Any

from mlx_isolate_engine.completion.request import JsonSchemaFormat

VERDICT = JsonSchemaFormat(
    schema={
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "reason": {"type": "string", "maxLength": 20}},
        "required": ["ok", "reason"],
        "additionalProperties": False,
    }
)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
)
FLAG = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Flag": FLAG},
    "properties": {
        "flag": {"$ref": "#/$defs/Flag"},
        "more": {"type": "array", "items": {"$ref": "#/$defs/Flag"}, "maxItems": 1},
    },
    "required": ["flag"],
    "additionalProperties": False,
}
# A schema as generators write it: what is only described, or cannot be enforced in a grammar.
GENERATED: dict[str, Any] = {
    "properties": {"n": {"type": "integer", "format": "uint32", "maximum": 9}},
    "propertyNames": {"pattern": "^n$"},
    "additionalProperties": False,
    "required": ["n"],
}


def declared(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters, **more}
    return {"type": "function", "function": function}


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


STRICT = tuple(map(strict, TOOLS[:1])) + TOOLS[1:]
