"""One row's tokens become events: characters, stops, reasoning, tool calls, logprobs."""

import json
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_isolate_engine.completion.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)
from mlx_isolate_engine.generation.assembly import TextAssembly
from mlx_isolate_engine.generation.decoding import ByteDecoder
from mlx_isolate_engine.generation.plan import TextPlan

TOOLS = ({"type": "function", "function": {"name": "add"}},)


def parse_json_call(text: str, tools: Any) -> Any:
    return json.loads(text.strip())


@dataclass
class FakeTokenizer:
    """The markers that the assembly asks mlx_lm's TokenizerWrapper for."""

    has_thinking: bool = True
    has_tool_calling: bool = True
    think_start: str = "<think>"
    think_end: str = "</think>"
    tool_call_start: str = "<tool_call>"
    tool_call_end: str = "</tool_call>"
    tool_parser: Any = field(default_factory=lambda: parse_json_call)
    structural_markers: tuple[str, ...] = ()
    response_transitions: dict[str, list[tuple[str, str]]] = field(
        default_factory=lambda: dict[str, list[tuple[str, str]]]()
    )


def assemble(pieces: list[bytes], plan: TextPlan, tokenizer: Any = None) -> list[Event]:
    """Feed each piece as one token, until a stop string ends it."""
    assembly = TextAssembly(plan, ByteDecoder(pieces.__getitem__), tokenizer or FakeTokenizer())
    events: list[Event] = []
    for token, raw in enumerate(pieces):
        logprob = TokenLogprob(token=raw.decode("utf-8", "replace"), raw=raw, logprob=-1.0)
        events += assembly.feed(token, logprob if plan.top_logprobs is not None else None)
        if assembly.stop_string is not None:
            break
    return events + assembly.finish()


def content(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ContentDelta))


def reasoning(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ReasoningDelta))


def calls(events: list[Event]) -> list[ToolCallDelta]:
    return [e for e in events if isinstance(e, ToolCallDelta)]


def logprob_bytes(events: list[Event]) -> bytes:
    return b"".join(p.raw for e in events if isinstance(e, ContentDelta) for p in e.logprobs)


def cut(text: str, source: random.Random) -> list[bytes]:
    raw = text.encode()
    edges = sorted({0, len(raw), *(source.randrange(len(raw) + 1) for _ in range(len(raw)))})
    return [raw[a:b] for a, b in pairwise(edges)]


@pytest.mark.case("32")
@settings(deadline=None)
@given(st.text(max_size=40), st.randoms(use_true_random=False))
def test_characters_are_never_split(text: str, source: random.Random) -> None:
    events = assemble(cut(text, source), TextPlan())
    assert content(events) == text
    assert all(e.text for e in events if isinstance(e, ContentDelta))


@pytest.mark.case("32")
def test_plain_ascii_comes_token_by_token() -> None:
    pieces = [b"one", b" ", b"two", b" three", b"\n"]
    assert [e.text for e in assemble(pieces, TextPlan()) if isinstance(e, ContentDelta)] == [
        "one", " ", "two", " three", "\n",
    ]  # fmt: skip


def test_a_character_that_the_end_cuts_is_one_replacement() -> None:
    assert content(assemble(["日".encode()[:2]], TextPlan())) == "\ufffd"


def test_invalid_bytes_are_replaced_where_they_are() -> None:
    assert content(assemble([b"a", b"\xff", b"b"], TextPlan())) == "a\ufffdb"


def test_a_stop_string_across_tokens_is_not_given_out() -> None:
    events = assemble([b"one <", b"E", b"ND> two"], TextPlan(stop=("<END>",)))
    assert content(events) == "one "


def test_what_looked_like_a_stop_string_is_given_out_at_the_end() -> None:
    assert content(assemble([b"one <E"], TextPlan(stop=("<END>",)))) == "one <E"


def test_reasoning_is_apart_from_content() -> None:
    events = assemble([b"<think>", b"why", b"</th", b"ink>", b"so"], TextPlan(split_reasoning=True))
    assert (reasoning(events), content(events)) == ("why", "so")


def test_a_prompt_that_opens_the_think_block_begins_in_it() -> None:
    plan = TextPlan(split_reasoning=True, initial_state="reasoning")
    events = assemble([b"why</think>so"], plan)
    assert (reasoning(events), content(events)) == ("why", "so")


def test_an_unclosed_think_block_is_reasoning() -> None:
    events = assemble([b"<think>why"], TextPlan(split_reasoning=True))
    assert (reasoning(events), content(events)) == ("why", "")


def test_a_text_completion_keeps_its_markers() -> None:
    assert content(assemble([b"<think>why"], TextPlan())) == "<think>why"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.case("34")
@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_tool_calls_do_not_depend_on_the_cuts(source: random.Random) -> None:
    plan = TextPlan(split_reasoning=True, tools=TOOLS)
    events = assemble(cut(f"I add.{CALL}{CALL}", source), plan)
    assert content(events) == "I add."
    first, second = calls(events)
    assert (first.index, second.index) == (0, 1)
    assert (first.name, json.loads(first.arguments)) == ("add", {"a": 1})
    assert first.id and second.id and first.id != second.id


@pytest.mark.case("34")
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "argum',
        '<tool_call>{"name": "f", "arguments": {"a": "\\d+"}}</tool_call>',
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>7</tool_call>",
        "<tool_call></tool_call> and on",
    ],
)
def test_a_malformed_or_truncated_call_is_raw_text(text: str) -> None:
    plan = TextPlan(split_reasoning=True, tools=TOOLS, top_logprobs=0)
    events = assemble([text.encode()], plan)
    assert (content(events), calls(events)) == (text, [])
    assert logprob_bytes(events) == text.encode()


def test_without_tools_in_the_request_a_call_is_text() -> None:
    assert content(assemble([CALL.encode()], TextPlan(split_reasoning=True))) == CALL


def test_a_call_inside_reasoning_is_a_call() -> None:
    plan = TextPlan(split_reasoning=True, tools=TOOLS)
    events = assemble([f"<think>hm {CALL} done".encode()], plan)
    assert len(calls(events)) == 1
    assert (reasoning(events), content(events)) == ("hm ", " done")


@pytest.mark.case("43")
@settings(deadline=None)
@given(
    st.text(alphabet="aé日👩<>/think", max_size=40),
    st.lists(st.sampled_from(["a", "日", "<t", "nk>"]), max_size=2, unique=True),
    st.randoms(use_true_random=False),
)
def test_bytes_of_logprobs_join_to_the_content(
    text: str, stop: list[str], source: random.Random
) -> None:
    plan = TextPlan(stop=tuple(stop), split_reasoning=True, tools=TOOLS, top_logprobs=2)
    events = assemble(cut(f"{text}<think>aé</think>{text}{CALL}{text}", source), plan)
    assert logprob_bytes(events) == content(events).encode()


def test_a_leading_space_is_dropped_where_the_tokenizer_writes_one() -> None:
    plan = TextPlan(trim_space=True, top_logprobs=0)
    events = assemble([b" Hello", b" you"], plan)
    assert content(events) == "Hello you"
    assert logprob_bytes(events) == b"Hello you"


def test_family_states_that_are_neither_are_not_shown() -> None:
    tokenizer = FakeTokenizer(
        has_thinking=False,
        has_tool_calling=False,
        response_transitions={"header": [("|m|", "normal")], "normal": [("|e|", "header")]},
    )
    plan = TextPlan(split_reasoning=True, initial_state="header", top_logprobs=0)
    events = assemble([b"to=u|m|he", b"llo|e|to", b"=x|m|!"], plan, tokenizer)
    assert content(events) == "hello!"
    assert logprob_bytes(events) == b"hello!"
