"""From a format, a forced call or strict tools to a compiled grammar, cached; blocking.

Grammars are llguidance's. What it cannot compile is refused before anything runs.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from mlx_isolate_engine.completion.grammars import (
    Marker,
    begun_call,
    forced_call,
    json_answer,
    json_answer_or_calls,
)
from mlx_isolate_engine.completion.request import (
    ChatPrompt,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from mlx_isolate_engine.generation.plan import AwaitedMarker, CallConstraint, Constraint
from mlx_isolate_engine.generation.vocabulary import Vocabulary
from mlx_isolate_shared.errors import RequestError

# Compiled grammars kept; without a limit every new schema would stay for ever.
GRAMMARS_MAX = 64
# Longest grammar in bytes; a long constant costs every row of a batch time at each token.
GRAMMAR_BYTES_MAX = 256 << 10
# The tool format whose calls are plain JSON between two markers.
JSON_TOOLS_MODULE = "json_tools"


class _Wanted(NamedTuple):
    """A grammar, the field to name if it is wrong, and what part of the answer it is for."""

    grammar: str
    param: str
    is_of_calls: bool = False


class ConstraintCompiler:
    """Compiles for one tokenizer; may be used by several threads at once.

    Args:
        tokenizer: mlx_lm's TokenizerWrapper.
        vocabulary_size: width of the model's output.
        vocabulary: gives the vocabulary that grammars are compiled for; raises ValueError where
            llguidance does not know the tokenizer's kind.
    """

    def __init__(
        self, tokenizer: Any, vocabulary_size: int, vocabulary: Callable[[], LLTokenizer]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._make_vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._markers: dict[str, AwaitedMarker] = {}

    def is_needed(self, request: CompletionRequest) -> bool:
        """Whether an answer may not be just anything; cheap.

        Raises:
            RequestError: 400; a call is to be forced that cannot be.
        """
        if request.tool_choice.mode not in ("auto", "none"):
            return bool(self._forced_functions(request))
        is_format = request.response_format is not None
        return is_format or (bool(_strict_functions(request)) and self._can_hold_calls)

    def leaves_strict_calls_free(self, request: CompletionRequest) -> bool:
        """Whether tools are declared strict, and this family's calls cannot be held to them."""
        calls = bool(self._tokenizer.has_tool_calling) and bool(_strict_functions(request))
        return calls and not self._can_hold_calls

    def compile(
        self, request: CompletionRequest, initial_state: str
    ) -> Constraint | CallConstraint | None:
        """What the request's answer must look like; None = anything.

        Raises:
            RequestError: 400; the schema is wrong or not supported, or the choice is impossible.
        """
        if not self.is_needed(request):
            return None
        try:
            wanted = self._wanted(request)
        except RecursionError as error:
            raise RequestError("The schema is nested too deeply.") from error
        matcher = self._matcher(wanted)
        if wanted.is_of_calls:
            return CallConstraint(
                matcher=matcher, opening=self._awaited(self._tokenizer.tool_call_start)
            )
        # An open think block is ended by the model itself, and so is the head of a message, where
        # a family has one; what follows is the answer.
        after = self._end_of(initial_state)
        if after:
            return Constraint(matcher=matcher, after=self._awaited(after))
        return Constraint(matcher=self._gone_on(matcher, request))

    def _end_of(self, state: str) -> str:
        """The marker that leads from `state` to the answer; empty where that is there already."""
        if state == "normal":
            return ""
        formats: dict[str, list[tuple[str, str]]] = self._tokenizer.response_transitions
        ends = [marker for marker, after in formats.get(state, ()) if after == "normal"]
        if state == "reasoning" and self._tokenizer.has_thinking:
            ends.append(self._tokenizer.think_end)
        return ends[0] if ends else ""

    def _gone_on(self, matcher: LLMatcher, request: CompletionRequest) -> LLMatcher:
        """Where an answer goes on that has begun as the grammar wants it, behind that beginning."""
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt) or request.response_format is None:
            return matcher
        if not prompt.template_kwargs.get("continue_final_message"):
            return matcher
        begun = str(prompt.messages[-1].get("content") or "")
        if self._tokenizer.has_thinking:
            begun = begun.rpartition(self._tokenizer.think_end)[2]
        tokens = self._vocabulary("response_format").tokenize_str(begun)
        further = matcher.deep_copy()
        return further if further.try_consume_tokens(tokens) == len(tokens) else matcher

    def _wanted(self, request: CompletionRequest) -> _Wanted:
        choice = request.tool_choice
        functions = _functions(request)
        if choice.mode not in ("auto", "none"):
            forced = self._forced_functions(request)
            return _Wanted(forced_call(forced, self._opening, self._closing), "tools")
        strict_calls = functions if _strict_functions(request) and self._can_hold_calls else []
        match request.response_format:
            case None:
                return _Wanted(begun_call(strict_calls, self._closing), "tools", is_of_calls=True)
            case JsonObjectFormat(param=param):
                schema, strict = {"type": "object"}, True
            case JsonSchemaFormat(schema=schema, strict=strict, param=param):
                pass
        if functions and choice.mode == "auto" and self._calls_by_markers():
            grammar = json_answer_or_calls(
                schema, self._opening, self._closing, strict=strict, functions=strict_calls
            )
            return _Wanted(grammar, param)
        return _Wanted(json_answer(schema, strict=strict), param)

    def _forced_functions(self, request: CompletionRequest) -> list[dict[str, Any]]:
        functions, choice = _functions(request), request.tool_choice
        if choice.mode == "named":
            functions = [each for each in functions if each.get("name") == choice.name]
        if not functions:
            raise RequestError(
                "tool_choice asks for a function that is not among the tools.", param="tool_choice"
            )
        if not self._writes_json_calls:
            raise RequestError(
                "tool_choice must be auto or none for this model: calls in its format cannot be "
                "forced.",
                param="tool_choice",
            )
        return functions

    @property
    def _can_hold_calls(self) -> bool:
        """Whether a call that the model begins by itself can be held to a schema."""
        return self._writes_json_calls and self._calls_by_markers()

    @property
    def _writes_json_calls(self) -> bool:
        parser = getattr(self._tokenizer.tool_parser, "__module__", "")
        return str(parser).endswith(JSON_TOOLS_MODULE)

    def _calls_by_markers(self) -> bool:
        """Whether the family opens a call, anywhere in its answer, by one text of its own."""
        formats: dict[str, list[tuple[str, str]]] = self._tokenizer.response_transitions
        by_format = any(after == "tool" for pairs in formats.values() for _, after in pairs)
        return bool(self._tokenizer.has_tool_calling) and not by_format

    @property
    def _opening(self) -> Marker:
        return self._marker(self._tokenizer.tool_call_start)

    @property
    def _closing(self) -> Marker:
        return self._marker(self._tokenizer.tool_call_end)

    def _marker(self, text: str) -> Marker:
        token = self._tokenizer.get_vocab().get(text)
        # By llguidance's own reading, which is not the tokenizer's: it takes more for special.
        is_special = token is not None and self._vocabulary("tools").is_special_token(token)
        return Marker(text, token if is_special else None)

    def _awaited(self, text: str) -> AwaitedMarker:
        """A marker of the family, of which there are few; slow the first time."""
        if (known := self._markers.get(text)) is not None:
            return known
        vocabulary, raw = Vocabulary(self._tokenizer), text.encode()
        raws = [vocabulary.raw(token) for token in range(self._vocabulary_size)]
        made = self._markers[text] = AwaitedMarker(text=raw, overruns=overruns_of(raw, raws))
        return made

    def _matcher(self, wanted: _Wanted) -> LLMatcher:
        vocabulary = self._vocabulary(wanted.param)
        with self._lock:
            if (matcher := self._compiled.get(wanted.grammar)) is not None:
                self._compiled.move_to_end(wanted.grammar)
                return matcher
        matcher = _compiled(vocabulary, wanted.grammar, wanted.param)
        with self._lock:
            self._compiled[wanted.grammar] = matcher
            while len(self._compiled) > GRAMMARS_MAX:
                self._compiled.popitem(last=False)
        return matcher

    def _vocabulary(self, param: str) -> LLTokenizer:
        try:
            return self._make_vocabulary()
        except ValueError as error:
            raise RequestError(
                "Structured output is not supported with this model's tokenizer.", param=param
            ) from error


def overruns_of(marker: bytes, raws: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    """See `AwaitedMarker.overruns`.

    Args:
        marker: what opens a call.
        raws: bytes of every token.
    """
    found: list[list[int]] = [[] for _ in marker]
    later = set(marker[1:])
    for token, raw in enumerate(raws):
        if marker in raw and raw.index(marker) + len(marker) < len(raw):
            found[0].append(token)
        if raw and raw[0] in later:
            for written in range(1, len(marker)):
                rest = marker[written:]
                if len(raw) > len(rest) and raw.startswith(rest):
                    found[written].append(token)
    return tuple(map(tuple, found))


def _functions(request: CompletionRequest) -> list[dict[str, Any]]:
    tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
    return [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]


def _strict_functions(request: CompletionRequest) -> list[dict[str, Any]]:
    """Those that the model may call by itself, and then only as their schema says."""
    if request.tool_choice.mode != "auto":
        return []
    return [function for function in _functions(request) if function.get("strict")]


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
