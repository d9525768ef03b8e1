"""The OpenAPI document of an engine, generated from the structs that requests are decoded into."""

import functools
from typing import Any

import msgspec

from mlx_isolate_engine.protocols.anthropic_request import MessagesBody
from mlx_isolate_engine.protocols.chat import ChatBody
from mlx_isolate_engine.protocols.completions import CompletionsBody
from mlx_isolate_engine.protocols.fields import LaneBody, SamplingBody
from mlx_isolate_engine.protocols.response_input import PAGE_ITEMS_MAX
from mlx_isolate_engine.protocols.responses_request import ResponsesBody

# Path: what it does, and the structs its body is read into.
_GENERATION: dict[str, tuple[str, tuple[Any, ...]]] = {
    "/v1/chat/completions": ("Chat completion", (ChatBody, SamplingBody, LaneBody)),
    "/v1/completions": ("Text completion", (CompletionsBody, SamplingBody, LaneBody)),
    "/v1/responses": ("Response", (ResponsesBody, SamplingBody, LaneBody)),
    "/v1/messages": ("Anthropic message", (MessagesBody, LaneBody)),
    "/v1/messages/count_tokens": ("Tokens of an Anthropic message", (MessagesBody,)),
}
_PLAIN = {
    "/v1/models": "The models that are served",
    "/health": "Whether requests are taken",
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_ERRORS = {
    "400": "The request is wrong; `param` names the field",
    "413": "The body is too large",
    "429": "Too many requests",
    "500": "The engine failed",
    "503": "The engine is stopping",
}


@functools.cache
def openapi_document() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    bodies = [body for _, structs in _GENERATION.values() for body in structs]
    schemas, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    by_struct = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, (summary, structs) in _GENERATION.items():
        parts = [by_struct[struct] for struct in structs]
        schema = parts[0] if len(parts) == 1 else {"allOf": parts}
        paths[path] = {"post": _operation(summary, schema)}
    for path, summary in _PLAIN.items():
        paths[path] = {"get": _operation(summary, None)}
    paths["/v1/responses/{id}"] = _kept_response()
    paths["/v1/responses/{id}/input_items"] = _input_items()
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-isolate", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _error_schema()}},
    }


def _operation(summary: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "JSON, or events where `stream` is true"}}
    if schema is None:
        return {"summary": summary, "responses": responses}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, description in _ERRORS.items():
        responses[status] = {"description": description, "content": error}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": responses}


def _kept_response() -> dict[str, Any]:
    operations: dict[str, Any] = {"parameters": [_ID]}
    for method, summary in {"get": "A kept response", "delete": "Forget a response"}.items():
        operations[method] = _of_kept(summary)
    return operations


def _input_items() -> dict[str, Any]:
    schemas: dict[str, dict[str, Any]] = {
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "limit": {"type": "integer", "minimum": 1, "maximum": PAGE_ITEMS_MAX},
        "after": {"type": "string"},
    }
    query = [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]
    summary = "What a kept response was made of, page by page"
    return {"parameters": [_ID, *query], "get": _of_kept(summary)}


def _of_kept(summary: str) -> dict[str, Any]:
    operation = _operation(summary, None)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    faults = {
        "400": {"description": _ERRORS["400"], "content": error},
        "404": {"description": "It is not kept here (any more)", "content": error},
    }
    return {**operation, "responses": {**operation["responses"], **faults}}


def _error_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {"message": text, "type": text, "param": text, "code": text},
            }
        },
    }
