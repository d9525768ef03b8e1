"""Joins the events of one completion for an answer that is not streamed."""

from collections.abc import Iterator

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


class Text(msgspec.Struct, kw_only=True):
    """Content, or reasoning, up to a part of another kind."""

    is_reasoning: bool
    pieces: list[str]
    logprobs: list[TokenLogprob]

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(self.pieces)


class Transcript:
    """What a completion said, part by part until `summary` is set."""

    def __init__(self) -> None:
        # In the order in which the model wrote them.
        self.parts: list[Text | ToolCall] = []
        self._calls: dict[int, ToolCall] = {}
        self._summary: CompletionSummary | None = None

    def add(self, event: Event) -> None:
        """Take one event."""
        match event:
            case ContentDelta():
                part = self._open_text(is_reasoning=False)
                part.pieces.append(event.text)
                part.logprobs.extend(event.logprobs)
            case ReasoningDelta():
                self._open_text(is_reasoning=True).pieces.append(event.text)
            case ToolCallDelta():
                call = self._calls.get(event.index)
                if call is None:
                    call = self._calls[event.index] = ToolCall(id="", name="", arguments="")
                    self.parts.append(call)
                call.id += event.id or ""
                call.name += event.name or ""
                call.arguments += event.arguments
            case PrefillProgress():
                pass

    def _open_text(self, *, is_reasoning: bool) -> Text:
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, Text) or last.is_reasoning != is_reasoning:
            last = Text(is_reasoning=is_reasoning, pieces=[], logprobs=[])
            self.parts.append(last)
        return last

    def end(self, summary: CompletionSummary) -> None:
        """Take the summary; nothing follows it."""
        self._summary = summary

    @property
    def text(self) -> str:
        """All content."""
        return "".join(part.text for part in self._texts(is_reasoning=False))

    @property
    def reasoning(self) -> str:
        """All text from inside think blocks."""
        return "".join(part.text for part in self._texts(is_reasoning=True))

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The tokens of all content, where they were asked for."""
        return [one for part in self._texts(is_reasoning=False) for one in part.logprobs]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Whole tool calls in the order of their index."""
        return [self._calls[index] for index in sorted(self._calls)]

    def _texts(self, *, is_reasoning: bool) -> Iterator[Text]:
        for part in self.parts:
            if isinstance(part, Text) and part.is_reasoning == is_reasoning:
                yield part

    @property
    def summary(self) -> CompletionSummary:
        """How it ended."""
        assert self._summary is not None, "the completion has not ended"
        return self._summary
