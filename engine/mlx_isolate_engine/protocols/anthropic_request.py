"""Anthropic message requests: blocks to the plain messages that chat templates take.

The texts of one message are joined without a separator. Tool results become messages of their own,
in place; thinking becomes the reasoning of its turn, redacted thinking is left out; the answer goes
on with a text of the assistant that stands last. `cache_control` is ignored, since the prompt cache
finds its prefixes by itself.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlx_isolate_engine.completion.request import (
    ChatPrompt,
    CompletionRequest,
    ResponseFormat,
    SamplingRequest,
    ToolChoice,
)
from mlx_isolate_engine.protocols.contract import Call
from mlx_isolate_engine.protocols.fields import (
    STOP_STRINGS_MAX,
    FreeForm,
    LaneBody,
    StopString,
    TokenCount,
    TopK,
    TopP,
    schema_format,
    token_limit,
)
from mlx_isolate_engine.protocols.json_body import check_free_form, decode_body
from mlx_isolate_engine.protocols.tools import (
    TOOLS_MAX,
    DeclaredFunction,
    ToolName,
    at_most_one,
    named_function,
    named_mode,
    template_tool,
)
from mlx_isolate_shared.errors import RequestError


class Block(Struct, frozen=True, kw_only=True):
    """A content block of any type that a request may hold."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: FreeForm | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


class AnthropicMessage(Struct, frozen=True, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None


class AnthropicTool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: FreeForm | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct, frozen=True, kw_only=True):
    """How tools may be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """Whether the model shall think, and whether that is shown; the budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    """A format that the output must have."""

    type: Literal["json_schema"]
    schema: FreeForm


class OutputConfig(Struct, frozen=True, kw_only=True):
    """Effort and format of the output."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesBody(Struct, frozen=True, kw_only=True):
    """A request for a message, or to count its tokens."""

    messages: list[AnthropicMessage] | None = None
    system: str | list[Block] | None = None
    max_tokens: TokenCount | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=STOP_STRINGS_MAX)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    compaction: Any = None
    thread: Any = None

    @property
    def hides_thinking(self) -> bool:
        """Whether the answer shows that the model thought, but not what."""
        return self.thinking is not None and self.thinking.display == "omitted"


def parse_body(body: bytes, call: Call) -> tuple[MessagesBody, CompletionRequest]:
    """The body and the completion that it asks for.

    Raises:
        RequestError: 400 naming the field.
    """
    message = decode_body(body, MessagesBody)
    lane = decode_body(body, LaneBody)
    _refuse_what_runs_elsewhere(message)
    tools = tuple(
        _template_tool(tool, f"tools[{index}]") for index, tool in enumerate(message.tools or ())
    )
    request = CompletionRequest(
        request_id=call.request_id,
        prompt=ChatPrompt(
            messages=_template_messages(message),
            tools=tools,
            template_kwargs=_template_arguments(message),
        ),
        max_tokens=token_limit(message.max_tokens, "max_tokens"),
        stop=tuple(message.stop_sequences or ()),
        sampling=SamplingRequest(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=None if message.top_k is None else max(0, message.top_k),
        ),
        response_format=_response_format(message.output_config),
        tool_choice=_tool_choice(message.tool_choice, tools),
        stream=bool(message.stream),
        adapter=lane.adapters,
        draft_model=lane.draft_model,
        num_draft_tokens=lane.num_draft_tokens,
    )
    return message, request


def _refuse_what_runs_elsewhere(message: MessagesBody) -> None:
    if message.container is not None:
        raise RequestError("There are no containers here.", param="container")
    if message.mcp_servers:
        raise RequestError("No MCP server is called from here.", param="mcp_servers")
    if message.compaction is not None:
        raise RequestError("No conversation is compacted here.", param="compaction")
    if message.thread is not None:
        raise RequestError(
            "No conversation is kept here; send all of it in 'messages'.", param="thread"
        )


def _template_arguments(message: MessagesBody) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if message.thinking is not None:
        arguments["enable_thinking"] = message.thinking.type != "disabled"
    if message.output_config is not None and message.output_config.effort is not None:
        arguments["reasoning_effort"] = message.output_config.effort
    if _ends_in_an_answer(message):
        arguments["continue_final_message"] = True
    return arguments


def _ends_in_an_answer(message: MessagesBody) -> bool:
    last = message.messages[-1] if message.messages else None
    if last is None or last.role != "assistant" or not last.content:
        return False
    if isinstance(last.content, str):
        return True
    return last.content[-1].type == "text" and bool(last.content[-1].text)


def _response_format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    return schema_format(config.format.schema, True, "output_config.format.schema")


def _template_tool(tool: AnthropicTool, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"Invalid value for '{param}.type': only tools that the client runs can be used here.",
            param=f"{param}.type",
        )
    function = DeclaredFunction(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return template_tool(function, f"{param}.input_schema")


def _tool_choice(choice: AnthropicToolChoice | None, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    match choice.type:
        case "any":
            plain = named_mode("required", tools)
        case "tool":
            plain = named_function(choice.name or "", tools)
        case "auto" | "none":
            plain = named_mode(choice.type, tools)
    return at_most_one(plain, parallel=not choice.disable_parallel_tool_use)


def _template_messages(message: MessagesBody) -> tuple[dict[str, Any], ...]:
    if not message.messages:
        raise RequestError("'messages' must hold at least one message.", param="messages")
    plain: list[dict[str, Any]] = []
    system = _joined(message.system or "", "system")
    if system:
        plain.append({"role": "system", "content": system})
    for index, turn in enumerate(message.messages):
        place = f"messages[{index}].content"
        if turn.content is None:
            raise RequestError(f"'{place}' is required.", param=place)
        if isinstance(turn.content, str):
            plain.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            plain.append(_assistant_turn(turn.content, place))
        else:
            plain.extend(_user_turn(turn.role, turn.content, place))
    return tuple(plain)


def _assistant_turn(blocks: Sequence[Block], param: str) -> dict[str, Any]:
    text, thinking = "", ""
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{param}[{index}]"
        match block.type:
            case "thinking":
                thinking += block.thinking or ""
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_template_call(block, place))
            case _:
                text += _text_of(block, place)
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        turn["reasoning_content"] = thinking
    if calls:
        turn["tool_calls"] = calls
    return turn


def _template_call(block: Block, param: str) -> dict[str, Any]:
    if block.name is None:
        raise RequestError(f"'{param}.name' is required.", param=f"{param}.name")
    check_free_form(block.input, f"{param}.input")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": block.name, "arguments": block.input or {}},
    }
    if block.id is not None:
        call["id"] = block.id
    return call


def _user_turn(role: str, blocks: Sequence[Block], param: str) -> list[dict[str, Any]]:
    """Tool results as messages of their own, and the texts between them joined, in order."""
    plain: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{param}[{index}]"
        if block.type == "tool_result":
            if texts:
                plain.append({"role": role, "content": "".join(texts)})
                texts = []
            result = {"role": "tool", "content": _joined(block.content or "", f"{place}.content")}
            if block.tool_use_id is not None:
                result["tool_call_id"] = block.tool_use_id
            plain.append(result)
        else:
            texts.append(_text_of(block, place))
    if texts or not plain:
        plain.append({"role": role, "content": "".join(texts)})
    return plain


def _joined(content: str | Sequence[Block], param: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(block, f"{param}[{index}]") for index, block in enumerate(content))


def _text_of(block: Block, param: str) -> str:
    if block.type == "text":
        if block.text is None:
            raise RequestError(f"'{param}.text' is required.", param=f"{param}.text")
        return block.text
    if block.type in ("image", "document"):
        raise RequestError(
            f"This model does not take {block.type}s; '{param}' must be text.",
            param=param,
            code="unsupported_content",
        )
    raise RequestError(f"Invalid value for '{param}.type': not a block to use here.", param=param)
