"""Anthropic messages: the answer as content blocks, whole or as named events."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
)
from mlx_isolate_engine.completion.request import CompletionRequest
from mlx_isolate_engine.protocols.anthropic_request import parse_body
from mlx_isolate_engine.protocols.contract import Call, Delta
from mlx_isolate_engine.protocols.transcript import Text, ToolCall, Transcript
from mlx_isolate_shared.anthropic_error import anthropic_event
from mlx_isolate_shared.errors import HttpError


def parse(body: bytes, call: Call) -> "MessageRequest":
    """Parse a request body.

    Raises:
        RequestError: 400 naming the field.
    """
    message, request = parse_body(body, call)
    return MessageRequest(
        call, request, stream=bool(message.stream), hides_thinking=message.hides_thinking
    )


def parse_count(body: bytes, call: Call) -> CompletionRequest:
    """Parse the body of a request to count tokens.

    Raises:
        RequestError: 400 naming the field.
    """
    return parse_body(body, call)[1]


def count_body(tokens: int) -> bytes:
    """The answer to a request to count tokens."""
    return msgspec.json.encode({"input_tokens": tokens})


class MessageRequest:
    """A parsed message request with its two formatters."""

    def __init__(
        self, call: Call, request: CompletionRequest, *, stream: bool, hides_thinking: bool
    ) -> None:
        self.completions = (request,)
        self.stream = stream
        self._hides_thinking = hides_thinking
        self._call = call

    def streamer(self) -> "MessageStreamer":
        """A formatter for the streamed answer."""
        return MessageStreamer(self._head(), hides_thinking=self._hides_thinking)

    def body(self, transcripts: Sequence[Transcript]) -> bytes:
        """The whole answer as JSON."""
        (transcript,) = transcripts
        summary = transcript.summary
        return msgspec.json.encode(
            {
                **self._head(),
                "content": [self._block(part) for part in transcript.parts],
                **_stop(summary),
                "usage": _usage(summary),
                "timings": summary.timings,
            }
        )

    def _block(self, part: Text | ToolCall) -> dict[str, Any]:
        block = _block(part)
        if self._hides_thinking and block["type"] == "thinking":
            block["thinking"] = ""
        return block

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._call.unique}",
            "type": "message",
            "role": "assistant",
            "model": self._call.identity.model,
        }


def _block(part: Text | ToolCall) -> dict[str, Any]:
    match part:
        case ToolCall(id=id, name=name, arguments=arguments):
            return {"type": "tool_use", "id": id, "name": name, "input": _input_object(arguments)}
        case Text(is_reasoning=True, text=text):
            return {"type": "thinking", "thinking": text, "signature": ""}
        case Text(text=text):
            return {"type": "text", "text": text}


def _stop(summary: CompletionSummary) -> dict[str, str | None]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons[summary.finish_reason]
    if summary.finish_reason == "stop" and summary.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": summary.stop_string}


def _usage(summary: CompletionSummary) -> dict[str, int]:
    """Anthropic counts the tokens from the cache beside the input, not within it."""
    return {
        "input_tokens": summary.prompt_tokens - summary.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": summary.cached_tokens,
        "output_tokens": summary.completion_tokens,
    }


def _input_object(arguments: str) -> dict[str, Any]:
    """Arguments as the object that a tool_use block must hold; what is none is kept as text."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _event(name: str, **fields: Any) -> bytes:
    payload = msgspec.json.encode({"type": name, **fields})
    return b"event: %s\ndata: %s\n\n" % (name.encode(), payload)


class MessageStreamer:
    """Named events: one message, its blocks one after the other, each started and stopped."""

    def __init__(self, head: dict[str, Any], *, hides_thinking: bool) -> None:
        self._head = head
        self._hides_thinking = hides_thinking
        self._block = -1
        # What the open block holds: `text`, `thinking`, or the index of a tool call.
        self._open: str | int | None = None

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        """The start of the message; what came from the cache is known at its end."""
        usage = {
            "input_tokens": prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        stop = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, "content": [], **stop, "usage": usage})

    def delta(self, index: int, delta: Delta) -> Iterable[bytes]:
        """A delta of the open block, after what opens another one where that is due."""
        match delta:
            case ContentDelta():
                start = {"type": "text", "text": ""}
                part = {"type": "text_delta", "text": delta.text}
                kind: str | int = "text"
            case ReasoningDelta():
                start = {"type": "thinking", "thinking": "", "signature": ""}
                part = {"type": "thinking_delta", "thinking": delta.text}
                kind = "thinking"
            case ToolCallDelta():
                start = {"type": "tool_use", "id": delta.id or "", "name": delta.name or ""}
                part = {"type": "input_json_delta", "partial_json": delta.arguments}
                kind = delta.index
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._block += 1
            block: dict[str, Any] = start if isinstance(kind, str) else {**start, "input": {}}
            yield _event("content_block_start", index=self._block, content_block=block)
        if kind == "thinking" and self._hides_thinking:
            return
        if not part.get("partial_json", True):
            return
        yield _event("content_block_delta", index=self._block, delta=part)

    def finish(self, index: int, summary: CompletionSummary) -> Iterable[bytes]:
        """The end of the last block, then why the message ends and what it cost."""
        yield from self._close()
        yield _event("message_delta", delta=_stop(summary), usage=_usage(summary))

    def end(self) -> Iterable[bytes]:
        """The end of the message."""
        yield _event("message_stop")

    def error(self, error: HttpError) -> bytes:
        """An error event."""
        return anthropic_event(error)

    def keepalive(self, done: int, total: int) -> bytes:
        """A ping; this protocol's clients know it by name."""
        return _event("ping")

    def _close(self) -> Iterable[bytes]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._block)
