"""The wire form of an error for the protocol that a path speaks: a JSON body or an SSE event."""

from mlx_isolate_shared.anthropic_error import anthropic_body, anthropic_event
from mlx_isolate_shared.errors import HttpError

ANTHROPIC_PATHS = ("/v1/messages",)


def error_body(error: HttpError, path: str) -> bytes:
    """The JSON body of an error answer; a superset of OpenAI's for Anthropic's endpoints."""
    return anthropic_body(error) if path.startswith(ANTHROPIC_PATHS) else error.body()


def error_event(error: HttpError, path: str) -> bytes:
    """One whole SSE event that tells a streaming client why its answer ends here."""
    if path.startswith(ANTHROPIC_PATHS):
        return anthropic_event(error)
    return raw_error_event(error.body(), path)


def raw_error_event(body: bytes, path: str) -> bytes:
    """The same for the body of an error answer, which is one line of JSON."""
    name = b"event: error\n" if path.startswith(ANTHROPIC_PATHS) else b""
    return name + b"data: " + body + b"\n\n"
