"""OpenAI chat messages to the plain form that chat templates take.

Text parts are joined without a separator, so that a list of parts means the same as the joined
string. `developer` becomes `system`, the name templates know. Arguments of replayed tool calls
become objects where they are JSON objects and stay text where they are not.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from mlx_isolate_engine.protocols.fields import FreeForm
from mlx_isolate_engine.protocols.json_body import check_free_form
from mlx_isolate_shared.errors import RequestError

Role = Literal["system", "developer", "user", "assistant", "tool"]
_NOT_TEXT = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}


class ContentPart(Struct, frozen=True, kw_only=True):
    """One part of a message's content."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """The function of a replayed tool call; clients send arguments as text or as an object."""

    name: str
    arguments: str | FreeForm | None = None


class ReplayedToolCall(Struct, frozen=True, kw_only=True):
    """A tool call of an earlier assistant turn."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction


class Message(Struct, frozen=True, kw_only=True):
    """One message of a chat request."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ReplayedToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


def template_messages(
    messages: Sequence[Message] | None, param: str = "messages"
) -> tuple[dict[str, Any], ...]:
    """The messages as a chat template takes them.

    Raises:
        RequestError: there are none, or one has no content, or content that is no text.
    """
    if not messages:
        raise RequestError(f"'{param}' must hold at least one message.", param=param)
    return tuple(
        _template_message(message, f"{param}[{index}]") for index, message in enumerate(messages)
    )


def _template_message(message: Message, param: str) -> dict[str, Any]:
    _refuse_what_is_lost(message, param)
    content = _text(message.content, f"{param}.content")
    if content is None and message.role == "assistant":
        content = message.refusal
    if content is None and message.role in ("system", "developer", "user"):
        raise RequestError(f"'{param}.content' is required.", param=f"{param}.content")
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "tool" and message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.role == "assistant":
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            plain["reasoning_content"] = reasoning
        if message.tool_calls:
            plain["tool_calls"] = [
                _template_call(call, f"{param}.tool_calls[{index}]")
                for index, call in enumerate(message.tool_calls)
            ]
    return plain


def _refuse_what_is_lost(message: Message, param: str) -> None:
    if message.function_call is not None:
        raise RequestError(
            f"'{param}.function_call' is no longer supported; use 'tool_calls'.",
            param=f"{param}.function_call",
        )
    if message.audio is not None:
        raise RequestError(
            f"This model does not take audio; '{param}' must be text.",
            param=f"{param}.audio",
            code="unsupported_content",
        )


def _template_call(call: ReplayedToolCall, param: str) -> dict[str, Any]:
    function = {
        "name": call.function.name,
        "arguments": arguments_object(call.function.arguments, f"{param}.function.arguments"),
    }
    plain: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        plain["id"] = call.id
    return plain


def arguments_or_text(arguments: str) -> str | FreeForm:
    """Arguments as an object if they are one, else the text as the model wrote it."""
    if not arguments:
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return arguments
    return value if isinstance(value, dict) else arguments


def arguments_object(arguments: str | FreeForm | None, param: str) -> str | FreeForm:
    """Arguments of a replayed call, as `arguments_or_text` gives them.

    Raises:
        RequestError: they are nested too deeply.
    """
    if arguments is None:
        return {}
    plain = arguments_or_text(arguments) if isinstance(arguments, str) else arguments
    check_free_form(plain, param)
    return plain


def _text(content: str | Sequence[ContentPart] | None, param: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentPart, param: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise RequestError(f"'{param}.{part.type}' is required.", param=f"{param}.{part.type}")
    kind = _NOT_TEXT.get(part.type or "")
    if kind is not None:
        raise RequestError(
            f"This model does not take {kind}; '{param}' must be text.",
            param=param,
            code="unsupported_content",
        )
    raise RequestError(f"Invalid value for '{param}.type': expected 'text'.", param=f"{param}.type")
