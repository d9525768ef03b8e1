"""Reading tool calls out of a model's text, by mlx-lm's parser for its family."""

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from mlx_isolate_engine.completion.events import ToolCallDelta
from mlx_isolate_engine.generation.scan import Transitions

log = logging.getLogger(__name__)


class ToolCallReader:
    """Turns the text between a family's tool markers into calls, numbered as they come.

    Args:
        parser: mlx_lm's `tokenizer.tool_parser`.
        tools: the request's tools; some parsers take argument types from them.
    """

    def __init__(self, parser: Any, tools: Sequence[dict[str, Any]]) -> None:
        self._parser = parser
        self._tools = list(tools)
        self.count = 0

    def read(self, text: str) -> list[ToolCallDelta] | None:
        """The calls in `text`, each in one delta; None if it is malformed or was cut off."""
        try:
            parsed = self._parser(text, self._tools)
        except Exception as error:  # noqa: BLE001 - parsers raise whatever they happen to hit
            log.info("tool_call.malformed error=%s", type(error).__name__)
            return None
        calls = parsed if isinstance(parsed, list) else [parsed]
        deltas = [self._delta(call, index) for index, call in enumerate(calls, self.count)]
        found = [delta for delta in deltas if delta is not None]
        if not found or len(found) < len(deltas):
            return None
        self.count += len(found)
        return found

    @staticmethod
    def _delta(call: Any, index: int) -> ToolCallDelta | None:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps(arguments, ensure_ascii=False)
            except (TypeError, ValueError):
                return None
        own_id = call.get("id")
        call_id = own_id if isinstance(own_id, str) and own_id else f"call_{uuid.uuid4().hex[:24]}"
        return ToolCallDelta(index=index, id=call_id, name=call["name"], arguments=arguments)


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
