"""Reading tool calls out of a model's text, by mlx-lm's parser for its family."""

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from mlx_isolate_engine.completion.events import ToolCallDelta
from mlx_isolate_engine.generation.call_stream import CallStream
from mlx_isolate_engine.generation.scan import Transitions

log = logging.getLogger(__name__)


class ToolCallReader:
    """Turns the text between a family's tool markers into calls, numbered as they come.

    Where the family writes arguments as JSON, they are given out as the model wrote them; otherwise
    they are written anew from what the parser read.

    Args:
        parser: mlx_lm's `tokenizer.tool_parser`.
        tools: the request's tools; some parsers take argument types from them.
        streams: give arguments out piece by piece, where the family allows it. What has been given
            out of a call stays, whatever comes after it.
        one_call: give out the first call alone, whatever follows it.
    """

    def __init__(
        self,
        parser: Any,
        tools: Sequence[dict[str, Any]],
        *,
        streams: bool,
        one_call: bool = False,
    ) -> None:
        self._parser = parser
        self._tools = list(tools)
        self._streams = streams
        self._one_call = one_call
        self._block = CallStream.of(parser, one_call=one_call)
        self._begun = 0
        self.count = 0

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Parts of calls that are certain now that `text` of a block has come."""
        if self._block is None or not self._streams or self._is_done:
            return []
        return [
            ToolCallDelta(
                index=self._begun + piece.call,
                id=None if piece.name is None else _new_id(),
                name=piece.name,
                arguments=piece.arguments,
            )
            for piece in self._block.feed(text)
        ]

    def close(self, text: str, *, is_cut: bool = False) -> list[ToolCallDelta] | None:
        """A block has ended: calls of `text` not given out yet; None if there is none in it.

        Args:
            is_cut: the model would have written more of it.
        """
        if self._is_done:
            return []
        block, self._block = self._block, CallStream.of(self._parser, one_call=self._one_call)
        if is_cut and block is None:
            return None  # some parsers read a call out of half of one, without its arguments
        if block is not None and not self._streams:
            block.feed(text)
        calls = self._read(text)
        written = block.arguments if block is not None and _begins(block, calls) else []
        given = len(block.names) if block is not None and self._streams else 0
        if given and not written:
            self._begun += given
            return []
        if calls is None:
            return None
        texts = [*written, *map(_arguments_text, calls[len(written) :])]
        deltas = [
            ToolCallDelta(
                index=self._begun + place, id=_id_of(call), name=call["name"], arguments=arguments
            )
            for place, (call, arguments) in enumerate(zip(calls, texts, strict=True))
            if arguments is not None
        ]
        if len(deltas) < len(calls):
            return None
        self._begun += len(calls)
        self.count += len(calls)
        return deltas[given:]

    @property
    def _is_done(self) -> bool:
        return self._one_call and self.count > 0

    def _read(self, text: str) -> list[dict[str, Any]] | None:
        """The calls by the family's parser, at least one; None if it is malformed or cut off."""
        try:
            parsed = self._parser(text, self._tools)
        except Exception as error:  # noqa: BLE001 - parsers raise whatever they happen to hit
            log.info("tool_call.malformed error=%s", type(error).__name__)
            return None
        calls: list[Any] = parsed if isinstance(parsed, list) else [parsed]
        if not calls or not all(_is_call(call) for call in calls):
            return None
        return calls[:1] if self._one_call else calls


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("name"), str) and bool(call["name"])


def _begins(block: CallStream, calls: list[dict[str, Any]] | None) -> bool:
    """Whether a block was followed to the end of a call, and its parser begins with the same."""
    if calls is None or not block.is_complete:
        return False
    same = calls[: len(block.names)]
    if block.names != [call["name"] for call in same]:
        return False
    try:
        read = [json.loads(text) for text in block.arguments]
    except ValueError:
        return False
    return all(call.get("arguments", {}) == own for call, own in zip(same, read, strict=True))


def _arguments_text(call: dict[str, Any]) -> str | None:
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError):
        return None


def _id_of(call: dict[str, Any]) -> str:
    own = call.get("id")
    return own if isinstance(own, str) and own else _new_id()


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def transitions_of(tokenizer: Any, *, with_tools: bool) -> Transitions:
    """The markers of a model family, as its tokenizer (mlx_lm's wrapper) knows them.

    States: normal, reasoning, tool, and whatever else the family's response format names.
    """
    edges: dict[str, list[tuple[str, str]]] = {}

    def add(state: str, marker: str, after: str) -> None:
        if marker and (after != "tool" or with_tools):
            edges.setdefault(state, []).append((marker, after))

    if tokenizer.has_thinking:
        add("normal", tokenizer.think_start, "reasoning")
        add("reasoning", tokenizer.think_end, "normal")
    formats: dict[str, list[tuple[str, str]]] = tokenizer.response_transitions
    format_opens_tools = any(after == "tool" for pairs in formats.values() for _, after in pairs)
    if tokenizer.has_tool_calling and with_tools:
        if not format_opens_tools:
            add("normal", tokenizer.tool_call_start, "tool")
        if tokenizer.has_thinking:
            add("reasoning", tokenizer.tool_call_start, "tool")
        add("tool", tokenizer.tool_call_end, "normal")
    for marker in tokenizer.structural_markers:
        add("normal", marker, "normal")
    for state, pairs in formats.items():
        for marker, after in pairs:
            add(state, marker, after)
    return {state: tuple(pairs) for state, pairs in edges.items()}
