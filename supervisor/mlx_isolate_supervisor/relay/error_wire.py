"""The wire form of an error for the protocol that a path speaks: a JSON body or an SSE event."""

import msgspec

from mlx_isolate_shared.errors import HttpError

ANTHROPIC_PATHS = ("/v1/messages",)

# Anthropic's names for what OpenAI's envelope says by status.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: HttpError, path: str) -> bytes:
    """The JSON body of an error answer; a superset of OpenAI's for Anthropic's endpoints."""
    if not path.startswith(ANTHROPIC_PATHS):
        return error.body()
    return msgspec.json.encode(_anthropic(error))


def error_event(error: HttpError, path: str) -> bytes:
    """One whole SSE event that tells a streaming client why its answer ends here."""
    if path.startswith(ANTHROPIC_PATHS):
        return b"event: error\ndata: " + msgspec.json.encode(_anthropic(error)) + b"\n\n"
    return b"data: " + error.body() + b"\n\n"


def _anthropic(error: HttpError) -> dict[str, object]:
    inner: dict[str, object] = dict(error.envelope()["error"])
    inner["type"] = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": inner}
