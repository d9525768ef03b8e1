"""OpenAI responses requests: input items to the plain messages that chat templates take.

Reasoning, text and function calls that follow each other are one assistant turn. Texts of one item
are joined without a separator.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlx_isolate_engine.completion.request import JsonObjectFormat, ResponseFormat, ToolChoice
from mlx_isolate_engine.protocols.chat_messages import arguments_object
from mlx_isolate_engine.protocols.fields import (
    TOP_LOGPROBS_MAX,
    FreeForm,
    TokenCount,
    schema_format,
)
from mlx_isolate_engine.protocols.tools import (
    TOOLS_MAX,
    DeclaredFunction,
    ToolName,
    named_function,
    named_mode,
    template_tool,
)
from mlx_isolate_shared.errors import RequestError


class InputPart(Struct, frozen=True, kw_only=True):
    """A part of an item's content."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True, kw_only=True):
    """An input item of any type; output items of earlier responses may be sent back as they are."""

    id: str | None = None
    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ResponseTool(Struct, frozen=True, kw_only=True):
    """A tool, which must be a function."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    parameters: FreeForm | None = None
    strict: bool | None = None


class ResponseToolChoice(Struct, frozen=True, kw_only=True):
    """A choice of one function."""

    type: str | None = None
    name: str | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """The format that the text must have."""

    type: str | None = None
    name: str | None = None
    schema: FreeForm | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    """Format and verbosity."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True, kw_only=True):
    """How much the model shall think."""

    effort: str | None = None


class ResponsesBody(Struct, frozen=True, kw_only=True):
    """A responses request, without its sampler fields."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: TokenCount | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: FreeForm | None = None


def template_input(
    items: str | Sequence[InputItem] | None, before: Sequence[dict[str, Any]] = ()
) -> tuple[dict[str, Any], ...]:
    """The conversation that input items continue, as a chat template takes it.

    Args:
        items: a text of the user, or items.
        before: messages of the conversation so far.

    Raises:
        RequestError: there are no items, or one is of a kind that cannot be used.
    """
    if items is None or (not isinstance(items, str) and not items):
        raise RequestError("'input' is required and may not be empty.", param="input")
    if isinstance(items, str):
        return (*before, {"role": "user", "content": items})
    conversation = _Conversation(before)
    for index, item in enumerate(items):
        _add_item(conversation, item, f"input[{index}]")
    return conversation.ended()


class _Conversation:
    """Messages, and what goes into the assistant turn at their end.

    That is joined once, when the turn ends: joined item by item, a turn of many items would take
    time that grows with their square.
    """

    def __init__(self, before: Sequence[dict[str, Any]]) -> None:
        self._messages = list(before)
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add_message(self, message: dict[str, Any]) -> None:
        self._end_turn()
        self._messages.append(message)

    def add_text(self, text: str) -> None:
        self._texts.append(text)

    def add_call(self, call: dict[str, Any]) -> None:
        self._calls.append(call)

    def ended(self) -> tuple[dict[str, Any], ...]:
        self._end_turn()
        return tuple(self._messages)

    def _end_turn(self) -> None:
        if not self._texts and not self._calls:
            return
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._messages and self._messages[-1]["role"] == "assistant":
            turn = dict(self._messages.pop())
        turn["content"] = "".join([turn["content"], *self._texts])
        if self._calls:
            turn["tool_calls"] = [*turn.get("tool_calls", ()), *self._calls]
        self._messages.append(turn)
        self._texts, self._calls = [], []


def _add_item(conversation: _Conversation, item: InputItem, param: str) -> None:
    match item.type:
        case None | "message":
            _add_message(conversation, item, param)
        case "function_call":
            if item.name is None:
                raise RequestError(f"'{param}.name' is required.", param=f"{param}.name")
            arguments = arguments_object(item.arguments, f"{param}.arguments")
            call: dict[str, Any] = {
                "type": "function",
                "function": {"name": item.name, "arguments": arguments},
            }
            if item.call_id is not None:
                call["id"] = item.call_id
            conversation.add_call(call)
        case "function_call_output":
            result = {"role": "tool", "content": _joined(item.output, f"{param}.output")}
            if item.call_id is not None:
                result["tool_call_id"] = item.call_id
            conversation.add_message(result)
        case "reasoning":
            text = _joined(item.content or item.summary, f"{param}.content")
            if text:
                turn = {"role": "assistant", "content": "", "reasoning_content": text}
                conversation.add_message(turn)
        case _:
            raise RequestError(
                f"Invalid value for '{param}.type': items of this type cannot be used here.",
                param=f"{param}.type",
            )


def _add_message(conversation: _Conversation, item: InputItem, param: str) -> None:
    if item.role is None:
        raise RequestError(f"'{param}.role' is required.", param=f"{param}.role")
    if item.content is None:
        raise RequestError(f"'{param}.content' is required.", param=f"{param}.content")
    text = _joined(item.content, f"{param}.content")
    if item.role == "assistant":
        conversation.add_text(text)
    else:
        role = "system" if item.role == "developer" else item.role
        conversation.add_message({"role": role, "content": text})


def _joined(content: str | Sequence[InputPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        place = f"{param}[{index}]"
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in ("input_image", "input_file", "input_audio"):
            raise RequestError(
                f"This model does not take {part.type[6:]}s; '{place}' must be text.",
                param=place,
                code="unsupported_content",
            )
        if text is None:
            raise RequestError(f"'{place}.text' is required.", param=f"{place}.text")
        texts.append(text)
    return "".join(texts)


def response_tools(tools: Sequence[ResponseTool] | None) -> tuple[dict[str, Any], ...]:
    """The tools as chat templates take them.

    Raises:
        RequestError: a tool that is no function.
    """
    plain: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        place = f"tools[{index}]"
        if tool.type != "function":
            raise RequestError(
                f"Invalid value for '{place}.type': only 'function' tools can be used here.",
                param=f"{place}.type",
            )
        if tool.name is None:
            raise RequestError(f"'{place}.name' is required.", param=f"{place}.name")
        function = DeclaredFunction(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        plain.append(template_tool(function, f"{place}.parameters"))
    return tuple(plain)


def response_tool_choice(
    choice: str | ResponseToolChoice | None, tools: Sequence[dict[str, Any]]
) -> ToolChoice:
    """The resolved tool choice.

    Raises:
        RequestError: an unknown mode, or a function that was not declared.
    """
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        return named_mode(choice, tools)
    if choice.type != "function" or choice.name is None:
        raise RequestError(
            "Invalid value for 'tool_choice': expected a mode or one function by name.",
            param="tool_choice",
        )
    return named_function(choice.name, tools)


def text_format(text: TextConfig | None) -> ResponseFormat | None:
    """The format that the output must have, None for plain text.

    Raises:
        RequestError: an unknown type, or a schema that is missing or too deep.
    """
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return JsonObjectFormat(param="text.format")
    if form.type != "json_schema":
        raise RequestError(
            "Invalid value for 'text.format.type': expected 'text', 'json_object' or "
            "'json_schema'.",
            param="text.format.type",
        )
    if form.schema is None:
        raise RequestError("'text.format.schema' is required.", param="text.format.schema")
    return schema_format(form.schema, form.strict, "text.format.schema")
