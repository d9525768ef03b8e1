"""Output items of a response while they grow: what each says when it opens, grows and ends."""

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_isolate_engine.completion.events import (
    ContentDelta,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)
from mlx_isolate_engine.protocols import openai_shapes as shapes
from mlx_isolate_engine.protocols.chat_messages import arguments_or_text
from mlx_isolate_engine.protocols.contract import Delta

Events = list[tuple[str, dict[str, Any]]]


class OpenItem(Protocol):
    """One output item."""

    def takes(self, delta: Delta) -> bool:
        """Whether a delta belongs to this item."""
        ...

    def added(self) -> Events:
        """What opens it."""
        ...

    def delta(self, delta: Delta) -> Events:
        """What a delta that it takes adds."""
        ...

    def done(self, status: str) -> Events:
        """What closes it."""
        ...

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it stands."""
        ...

    def template_fields(self) -> dict[str, Any]:
        """What it adds to the assistant's turn in a chat template."""
        ...


class MessageItem:
    """Text for the user."""

    def __init__(self, item_id: str, place: int, *, with_logprobs: bool) -> None:
        self._id = item_id
        self._place = place
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._with_logprobs = with_logprobs

    def takes(self, delta: Delta) -> bool:
        """Whether a delta belongs to this item."""
        return isinstance(delta, ContentDelta)

    def added(self) -> Events:
        """The item, then its one part."""
        item = {**self._head("in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            ("response.output_item.added", {"output_index": self._place, "item": item}),
            ("response.content_part.added", {**self._at(), "part": part}),
        ]

    def delta(self, delta: Delta) -> Events:
        """A piece of text."""
        assert isinstance(delta, ContentDelta)
        self._texts.append(delta.text)
        self._logprobs.extend(delta.logprobs)
        fields = {"delta": delta.text, "logprobs": _logprobs(delta.logprobs)}
        return [("response.output_text.delta", {**self._at(), **fields})]

    def done(self, status: str) -> Events:
        """The text, its part and the item."""
        part = self._part()
        item = self.whole(status)
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", {**self._at(), **text}),
            ("response.content_part.done", {**self._at(), "part": part}),
            ("response.output_item.done", {"output_index": self._place, "item": item}),
        ]

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it stands."""
        return {**self._head(status), "content": [self._part()]}

    def template_fields(self) -> dict[str, Any]:
        """The turn's content."""
        return {"content": "".join(self._texts)}

    def _part(self) -> dict[str, Any]:
        logprobs = _logprobs(self._logprobs) if self._with_logprobs else []
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _head(self, status: str) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "status": status}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._place, "content_index": 0}


class ReasoningItem:
    """What the model thought."""

    def __init__(self, item_id: str, place: int) -> None:
        self._id = item_id
        self._place = place
        self._texts: list[str] = []

    def takes(self, delta: Delta) -> bool:
        """Whether a delta belongs to this item."""
        return isinstance(delta, ReasoningDelta)

    def added(self) -> Events:
        """The item, then its one part."""
        item = {"id": self._id, "type": "reasoning", "summary": [], "content": []}
        part = {"type": "reasoning_text", "text": ""}
        return [
            ("response.output_item.added", {"output_index": self._place, "item": item}),
            ("response.content_part.added", {**self._at(), "part": part}),
        ]

    def delta(self, delta: Delta) -> Events:
        """A piece of text."""
        assert isinstance(delta, ReasoningDelta)
        self._texts.append(delta.text)
        return [("response.reasoning_text.delta", {**self._at(), "delta": delta.text})]

    def done(self, status: str) -> Events:
        """The text, its part and the item."""
        item = self.whole(status)
        part = item["content"][0]
        return [
            ("response.reasoning_text.done", {**self._at(), "text": part["text"]}),
            ("response.content_part.done", {**self._at(), "part": part}),
            ("response.output_item.done", {"output_index": self._place, "item": item}),
        ]

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it stands."""
        part = {"type": "reasoning_text", "text": "".join(self._texts)}
        return {"id": self._id, "type": "reasoning", "summary": [], "content": [part]}

    def template_fields(self) -> dict[str, Any]:
        """The turn's reasoning."""
        return {"reasoning_content": "".join(self._texts)}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._place, "content_index": 0}


class CallItem:
    """A call of a function."""

    def __init__(self, item_id: str, place: int, first: ToolCallDelta) -> None:
        self._id = item_id
        self._place = place
        self._index = first.index
        self._call_id = first.id or ""
        self._name = first.name or ""
        self._arguments: list[str] = []

    def takes(self, delta: Delta) -> bool:
        """Whether a delta belongs to this call."""
        return isinstance(delta, ToolCallDelta) and delta.index == self._index

    def added(self) -> Events:
        """The item without its arguments."""
        item = self.whole("in_progress")
        return [("response.output_item.added", {"output_index": self._place, "item": item})]

    def delta(self, delta: Delta) -> Events:
        """A piece of the arguments."""
        assert isinstance(delta, ToolCallDelta)
        if not delta.arguments:
            return []
        self._arguments.append(delta.arguments)
        fields = {**self._at(), "delta": delta.arguments}
        return [("response.function_call_arguments.delta", fields)]

    def done(self, status: str) -> Events:
        """The arguments and the item."""
        item = self.whole(status)
        whole = {"name": self._name, "arguments": item["arguments"]}
        return [
            ("response.function_call_arguments.done", {**self._at(), **whole}),
            ("response.output_item.done", {"output_index": self._place, "item": item}),
        ]

    def whole(self, status: str) -> dict[str, Any]:
        """The item as it stands."""
        return {
            "id": self._id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
        }

    def template_fields(self) -> dict[str, Any]:
        """One more of the turn's tool calls."""
        arguments = arguments_or_text("".join(self._arguments))
        function = {"name": self._name, "arguments": arguments}
        return {"tool_calls": [{"id": self._call_id, "type": "function", "function": function}]}

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._place}


def template_turn(items: Sequence[OpenItem]) -> list[dict[str, Any]]:
    """The assistant's turn that the items make, as a chat template takes it; none if empty."""
    if not items:
        return []
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        for name, value in item.template_fields().items():
            turn[name] = turn[name] + value if name in turn else value
    return [turn]


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    logprobs: list[dict[str, Any]] = shapes.chat_logprobs(tokens)["content"]
    return logprobs
