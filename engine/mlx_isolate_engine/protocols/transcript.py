"""Joins the events of one completion for an answer that is not streamed."""

import msgspec

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    Event,
    PrefillProgress,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)


class ToolCall(msgspec.Struct, kw_only=True):
    """One whole tool call; `arguments` is the text that the model wrote."""

    id: str
    name: str
    arguments: str


class Transcript:
    """What a completion said, part by part until `summary` is set."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, ToolCall] = {}
        self.logprobs: list[TokenLogprob] = []
        self._summary: CompletionSummary | None = None

    def add(self, event: Event) -> None:
        """Take one event."""
        match event:
            case ContentDelta():
                self._text.append(event.text)
                self.logprobs.extend(event.logprobs)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallDelta():
                call = self._tool_calls.setdefault(
                    event.index, ToolCall(id="", name="", arguments="")
                )
                call.id += event.id or ""
                call.name += event.name or ""
                call.arguments += event.arguments
            case PrefillProgress():
                pass

    def end(self, summary: CompletionSummary) -> None:
        """Take the summary; nothing follows it."""
        self._summary = summary

    @property
    def text(self) -> str:
        """All content."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """All text from inside think blocks."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Whole tool calls in the order of their index."""
        return [self._tool_calls[index] for index in sorted(self._tool_calls)]

    @property
    def summary(self) -> CompletionSummary:
        """How it ended."""
        assert self._summary is not None, "the completion has not ended"
        return self._summary
