"""Anthropic's error object, which both sides send on its endpoints; a superset of OpenAI's."""

import msgspec

from mlx_isolate_shared.errors import HttpError

# Anthropic's names for what OpenAI's envelope says by status.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: HttpError) -> bytes:
    """The JSON body of an error answer."""
    inner: dict[str, object] = dict(error.envelope()["error"])
    inner["type"] = _TYPES.get(error.status, "api_error")
    return msgspec.json.encode({"type": "error", "error": inner})


def anthropic_event(error: HttpError) -> bytes:
    """One whole SSE event that tells a streaming client why its answer ends here."""
    return b"event: error\ndata: " + anthropic_body(error) + b"\n\n"
