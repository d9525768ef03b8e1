"""From a response format or a forced tool choice to a compiled grammar, cached; blocking.

Grammars are llguidance's. What it cannot compile is refused before anything runs.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from mlx_isolate_engine.completion.grammar_vocabulary import grammar_vocabulary
from mlx_isolate_engine.completion.grammars import (
    Marker,
    forced_call,
    json_answer,
    json_answer_or_calls,
)
from mlx_isolate_engine.completion.request import (
    ChatPrompt,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    ToolChoice,
)
from mlx_isolate_engine.generation.plan import Constraint
from mlx_isolate_shared.errors import RequestError

# Compiled grammars kept; without a limit every new schema would stay for ever.
GRAMMARS_MAX = 64
# Longest grammar in bytes; a long constant costs every row of a batch time at each token.
GRAMMAR_BYTES_MAX = 256 << 10
# The tool format whose calls are plain JSON between two markers.
JSON_TOOLS_MODULE = "json_tools"


class ConstraintCompiler:
    """Compiles for one tokenizer; may be used by several threads at once.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
        vocabulary_size: width of the model's output.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, request: CompletionRequest, initial_state: str) -> Constraint | None:
        """What the request's answer must look like; None = anything.

        Raises:
            RequestError: 400; the schema is wrong or not supported, or the choice is impossible.
        """
        try:
            found = self._grammar(request)
        except RecursionError as error:
            raise RequestError("The schema is nested too deeply.") from error
        if found is None:
            return None
        grammar, param = found
        # An open think block is ended by the model itself; what follows it is the answer.
        think_end = tuple(self._tokenizer.think_end_tokens or ())
        return Constraint(
            matcher=self._matcher(grammar, param),
            after=think_end if initial_state == "reasoning" else (),
        )

    def _grammar(self, request: CompletionRequest) -> tuple[str, str] | None:
        """The grammar, and the field to name if it is wrong."""
        choice = request.tool_choice
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
        if choice.mode not in ("auto", "none"):
            return self._forced_call(choice, tools), "tools"
        match request.response_format:
            case None:
                return None
            case JsonObjectFormat(param=param):
                schema, strict = {"type": "object"}, True
            case JsonSchemaFormat(schema=schema, strict=strict, param=param):
                pass
        if tools and choice.mode == "auto" and self._calls_by_markers():
            opening, closing = self._markers()
            return json_answer_or_calls(schema, opening, closing, strict=strict), param
        return json_answer(schema, strict=strict), param

    def _forced_call(self, choice: ToolChoice, tools: Sequence[dict[str, Any]]) -> str:
        functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
        if choice.mode == "named":
            functions = [each for each in functions if each.get("name") == choice.name]
        if not functions:
            raise RequestError(
                "tool_choice asks for a function that is not among the tools.", param="tool_choice"
            )
        parser = getattr(self._tokenizer.tool_parser, "__module__", "")
        if not parser.endswith(JSON_TOOLS_MODULE):
            raise RequestError(
                "tool_choice must be auto or none for this model: calls in its format cannot be "
                "forced.",
                param="tool_choice",
            )
        return forced_call(functions, *self._markers())

    def _calls_by_markers(self) -> bool:
        """Whether the family opens a call, anywhere in its answer, by one text of its own."""
        formats: dict[str, list[tuple[str, str]]] = self._tokenizer.response_transitions
        by_format = any(after == "tool" for pairs in formats.values() for _, after in pairs)
        return bool(self._tokenizer.has_tool_calling) and not by_format

    def _markers(self) -> tuple[Marker, Marker]:
        """What begins and what ends a call."""
        return self._marker(self._tokenizer.tool_call_start), self._marker(
            self._tokenizer.tool_call_end
        )

    def _marker(self, text: str) -> Marker:
        token = self._tokenizer.get_vocab().get(text)
        # By llguidance's own reading, which is not the tokenizer's: it takes more for special.
        is_special = token is not None and self._vocabulary_for("tools").is_special_token(token)
        return Marker(text, token if is_special else None)

    def _matcher(self, grammar: str, param: str) -> LLMatcher:
        vocabulary = self._vocabulary_for(param)
        with self._lock:
            if (matcher := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return matcher
        matcher = _compiled(vocabulary, grammar, param)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > GRAMMARS_MAX:
                self._compiled.popitem(last=False)
        return matcher

    def _vocabulary_for(self, param: str) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary(param)
            return self._vocabulary

    def _make_vocabulary(self, param: str) -> LLTokenizer:
        try:
            return grammar_vocabulary(self._tokenizer, self._vocabulary_size)
        except ValueError as error:
            raise RequestError(
                "Structured output is not supported with this model's tokenizer.", param=param
            ) from error


def _compiled(vocabulary: LLTokenizer, grammar: str, param: str) -> LLMatcher:
    if len(grammar) > GRAMMAR_BYTES_MAX:
        raise RequestError(
            f"The schema is not supported: it is larger than {GRAMMAR_BYTES_MAX} bytes.",
            param=param,
        )
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if matcher.is_error():
        reason = matcher.get_error().strip().split("\n")[0][:300]
        raise RequestError(f"The schema is not supported: {reason}", param=param)
    # What only a first look at the tokens shows: a schema that refers to nothing but itself. It
    # also does here, where nobody else waits, most of what the first token would cost.
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise RequestError(
            "The schema is not supported: no answer can begin as it asks.", param=param
        )
    return matcher
