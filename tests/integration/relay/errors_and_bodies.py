"""What the tests of HTTP's edges send and read: bodies of a size, errors."""

import json

from tests.integration.relay.client_side import Answer


def error_of(answer: Answer) -> dict[str, object]:
    """OpenAI's error object of an answer, which must be JSON."""
    assert answer.one("content-type").startswith("application/json")
    error: dict[str, object] = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def of_size(size: int) -> bytes:
    """A JSON body of exactly `size` bytes, made of many messages."""
    body = b'{"model":"m","messages":[' + b'{"role":"user","content":"0123456789abcdef"},' * (
        (size - 100) // 45
    )
    return body + b'""' + b" " * (size - len(body) - 4) + b"]}"
