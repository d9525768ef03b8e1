"""Error types by whose fault they are, each of which knows its wire form.

Owns the mapping from an error to an HTTP status and OpenAI's error envelope. Knows nothing of
processes or models. The codes are in docs/operations.md.
"""

from typing import Any

import msgspec


class ConfigError(Exception):
    """Start-up cannot go on as configured; the message is one sentence that says what to do."""


class HttpError(Exception):
    """An error that a client is told about: status, OpenAI envelope, optional Retry-After.

    Args:
        message: one sentence for the client; never a path, class name or traceback.
        status: HTTP status code.
        type: OpenAI's error type.
        code: machine-readable code.
        param: the request field at fault, if one is.
        retry_after_s: seconds for the Retry-After header, if a new try is due.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        code: str | None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        # A message may quote what a client sent as bytes that are no UTF-8.
        message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def envelope(self) -> dict[str, Any]:
        """OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """The envelope as JSON bytes."""
        return msgspec.json.encode(self.envelope())

    def headers(self) -> dict[str, str]:
        """Response headers that belong to this error (Retry-After in whole seconds, >= 1)."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


class RequestError(HttpError):
    """The client's fault (4xx): a field is wrong, a model is unknown, the prompt is too long."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message, status=status, type=type, code=code, param=param)


class CapacityError(HttpError):
    """No room or no engine just now (429, 503, 507)."""

    def __init__(
        self, message: str, *, status: int, code: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(
            message, status=status, type="server_error", code=code, retry_after_s=retry_after_s
        )


class EngineError(HttpError):
    """The engine failed while it had the request (502 engine_died, 504 engine_hung, 500).

    Attributes:
        is_planned: whether it was told to end, and another may follow it at once.
        engine_lives: whether only the connection to it has ended.
    """

    def __init__(
        self, message: str, *, status: int, code: str | None, retry_after_s: float | None = 1.0
    ) -> None:
        super().__init__(
            message, status=status, type="server_error", code=code, retry_after_s=retry_after_s
        )
        self.is_planned = False
        self.engine_lives = False


class CacheError(Exception):
    """A cache entry cannot be used; it is a miss and never leaves the cache."""
