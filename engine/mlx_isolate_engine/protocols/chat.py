"""OpenAI chat completions."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mlx_isolate_engine.completion.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import ChatPrompt, CompletionRequest
from mlx_isolate_engine.protocols import openai_shapes as shapes
from mlx_isolate_engine.protocols.chat_messages import Message, template_messages
from mlx_isolate_engine.protocols.contract import Call, Delta
from mlx_isolate_engine.protocols.fields import (
    TOP_LOGPROBS_MAX,
    Choices,
    FreeForm,
    LaneBody,
    ResponseFormatBody,
    SamplingBody,
    Stop,
    StreamOptions,
    TokenCount,
    response_format,
    same_prompt,
    stop_strings,
    template_arguments,
    token_limit,
)
from mlx_isolate_engine.protocols.json_body import decode_body
from mlx_isolate_engine.protocols.openai_stream import ChunkStream, WriteChunk
from mlx_isolate_engine.protocols.tools import (
    TOOLS_MAX,
    DeclaredTool,
    NamedTool,
    at_most_one,
    template_tools,
    tool_choice,
)
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import RequestError


class ChatBody(Struct, frozen=True, kw_only=True):
    """A chat completions request, without its sampler fields."""

    messages: list[Message] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Choices | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: Annotated[list[DeclaredTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: ResponseFormatBody | None = None
    chat_template_kwargs: FreeForm | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None


def parse(body: bytes, call: Call) -> "ChatRequest":
    """Parse a request body.

    Raises:
        RequestError: 400 naming the field.
    """
    chat = decode_body(body, ChatBody)
    sampling = decode_body(body, SamplingBody).request()
    lane = decode_body(body, LaneBody)
    _refuse_what_is_not_text(chat)
    tools = template_tools(chat.tools)
    prompt = ChatPrompt(
        messages=template_messages(chat.messages),
        tools=tools,
        template_kwargs=_template_arguments(chat),
    )
    limit = token_limit(chat.max_completion_tokens, "max_completion_tokens")
    fallback_limit = token_limit(chat.max_tokens, "max_tokens")
    request = CompletionRequest(
        request_id=call.request_id,
        prompt=prompt,
        max_tokens=fallback_limit if limit is None else limit,
        stop=stop_strings(chat.stop),
        top_logprobs=_top_logprobs(chat),
        response_format=response_format(chat.response_format),
        tool_choice=at_most_one(
            tool_choice(chat.tool_choice, tools), parallel=chat.parallel_tool_calls
        ),
        stream=bool(chat.stream),
        adapter=lane.adapters,
        draft_model=lane.draft_model,
        num_draft_tokens=lane.num_draft_tokens,
    )
    completions = same_prompt(request, sampling, chat.n or 1, call.unique)
    include_usage = bool(chat.stream_options and chat.stream_options.include_usage)
    return ChatRequest(call, completions, stream=bool(chat.stream), include_usage=include_usage)


def _refuse_what_is_not_text(chat: ChatBody) -> None:
    if chat.functions or chat.function_call is not None:
        name = "functions" if chat.functions else "function_call"
        raise RequestError(f"'{name}' is no longer supported; use 'tools'.", param=name)
    if chat.web_search_options is not None:
        raise RequestError("There is no web search here.", param="web_search_options")
    if chat.audio is not None or any(kind != "text" for kind in chat.modalities or ()):
        name = "modalities" if chat.audio is None else "audio"
        raise RequestError(
            "This model answers in text only.", param=name, code="unsupported_content"
        )


def _template_arguments(chat: ChatBody) -> FreeForm:
    arguments = template_arguments(
        chat.chat_template_kwargs, effort=chat.reasoning_effort, verbosity=chat.verbosity
    )
    if chat.continue_final_message:
        _check_continuation(chat)
        arguments["continue_final_message"] = True
    return arguments


def _check_continuation(chat: ChatBody) -> None:
    """An answer that goes on has to begin with one: the way back after an engine's death."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "assistant" or not last.content or last.tool_calls:
        raise RequestError(
            "'continue_final_message' needs a last message of the assistant with text.",
            param="continue_final_message",
        )


def _top_logprobs(chat: ChatBody) -> int | None:
    if chat.logprobs:
        return chat.top_logprobs or 0
    if chat.top_logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    return None


class ChatRequest:
    """A parsed chat request with its two formatters."""

    def __init__(
        self,
        call: Call,
        completions: tuple[CompletionRequest, ...],
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        self._call = call
        self.completions = completions
        self.stream = stream
        self._include_usage = include_usage
        self._id = f"chatcmpl-{call.unique}"

    def _head(self, kind: str) -> dict[str, Any]:
        return shapes.head(self._id, kind, self._call, self.completions[0].adapter)

    def streamer(self) -> ChunkStream:
        """A formatter for the streamed answer."""
        head = self._head("chat.completion.chunk")
        pieces = _ChatPieces(head, self.completions, include_usage=self._include_usage)
        return ChunkStream(
            head, pieces, choices=len(self.completions), include_usage=self._include_usage
        )

    def body(self, transcripts: Sequence[Transcript]) -> bytes:
        """The whole answer as JSON."""
        with_logprobs = self.completions[0].top_logprobs is not None
        summaries = [transcript.summary for transcript in transcripts]
        return msgspec.json.encode(
            {
                **self._head("chat.completion"),
                "choices": [
                    _choice(index, transcript, with_logprobs)
                    for index, transcript in enumerate(transcripts)
                ],
                "usage": shapes.usage([summaries]),
                "timings": summaries[0].timings,
            }
        )


def _choice(index: int, transcript: Transcript, with_logprobs: bool) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in transcript.tool_calls
    ]
    text = transcript.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if transcript.reasoning:
        message["reasoning"] = message["reasoning_content"] = transcript.reasoning
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": shapes.chat_logprobs(transcript.logprobs) if with_logprobs else None,
        "finish_reason": transcript.summary.finish_reason,
    }


class _ChatPieces:
    """Deltas of chat choices; the first gives the role."""

    def __init__(
        self,
        head: dict[str, Any],
        completions: Sequence[CompletionRequest],
        *,
        include_usage: bool,
    ) -> None:
        self._with_logprobs = completions[0].top_logprobs is not None
        # A content chunk is these bytes, the text as JSON, and the closing ones: nothing else in
        # it changes from token to token.
        opening = msgspec.json.encode(head)[:-1]
        closing = msgspec.json.encode({"logprobs": None, "finish_reason": None})[1:]
        self._before = [
            b'data: %s,"choices":[{"index":%d,"delta":{"content":' % (opening, index)
            for index in range(len(completions))
        ]
        self._after = b"},%s]%s}\n\n" % (closing, b',"usage":null' if include_usage else b"")

    def nothing(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {}}

    def opening(self, chunk: WriteChunk) -> Iterable[bytes]:
        role = {"role": "assistant", "content": "", "refusal": None}
        return [chunk({"index": index, "delta": role}) for index in range(len(self._before))]

    def delta(self, index: int, delta: Delta, chunk: WriteChunk) -> Iterable[bytes]:
        match delta:
            case ContentDelta():
                if self._with_logprobs:
                    logprobs = shapes.chat_logprobs(delta.logprobs)
                    return (chunk({"index": index, "delta": {"content": delta.text}}, logprobs),)
                return (self._before[index] + msgspec.json.encode(delta.text) + self._after,)
            case ReasoningDelta():
                both = {"reasoning": delta.text, "reasoning_content": delta.text}
                return (chunk({"index": index, "delta": both}),)
            case ToolCallDelta():
                calls = {"tool_calls": [_call_delta(delta)]}
                return (chunk({"index": index, "delta": calls}),)


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is not None:
        function = {"name": delta.name, **function}
    call: dict[str, Any] = {"index": delta.index, "function": function}
    if delta.id is not None:
        call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return call
