"""Arguments of tool calls while they are written: the same text, however it is cut."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import (
    glm47,
    json_tools,
    kimi_k2,
    minicpm5,
    mistral,
    muse_spark,
    qwen3_coder,
)

from mlx_isolate_engine.completion.events import Event, ToolCallDelta
from mlx_isolate_engine.generation.assembly import TextAssembly
from mlx_isolate_engine.generation.decoding import ByteDecoder
from mlx_isolate_engine.generation.plan import TextPlan
from tests.unit.test_text_assembly import TOOLS, FakeTokenizer, calls, content, cut

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='aé"\\{}[]\n👩 ', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(alphabet='k"\\{', min_size=1, max_size=4), VALUES, max_size=4)
JSON_TOOLS = FakeTokenizer(tool_parser=json_tools.parse_tool_call)
MISTRAL = FakeTokenizer(
    tool_parser=mistral.parse_tool_call, tool_call_start="[TOOL_CALLS]", tool_call_end=""
)


def run(
    pieces: list[bytes], tokenizer: Any, *, stream: bool, one_call: bool = False
) -> tuple[list[Event], bool]:
    plan = TextPlan(split_reasoning=True, tools=TOOLS, stream_calls=stream, one_call=one_call)
    assembly = TextAssembly(plan, ByteDecoder(pieces.__getitem__), tokenizer)
    events = [event for token in range(len(pieces)) for event in assembly.feed(token)]
    return [*events, *assembly.finish()], assembly.has_tool_calls


def joined(events: list[Event]) -> list[tuple[str, str]]:
    """Name and arguments of each call; asserts that only its first part has name and id."""
    made: dict[int, list[ToolCallDelta]] = {}
    for delta in calls(events):
        made.setdefault(delta.index, []).append(delta)
    assert list(made) == list(range(len(made)))
    for first, *others in made.values():
        assert first.id and first.name
        assert all(other.id is None and other.name is None for other in others)
    return [(parts[0].name or "", "".join(p.arguments for p in parts)) for parts in made.values()]


def json_call(arguments: Any, **layout: Any) -> str:
    body = json.dumps({"name": "add", "arguments": arguments}, **layout)
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.case("34")
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_parts_join_to_the_whole_arguments_of_json_calls(
    arguments: list[dict[str, Any]], source: random.Random
) -> None:
    text = "so: " + "".join(
        json_call(each, ensure_ascii=source.random() < 0.5) for each in arguments
    )
    streamed, has_calls = run(cut(text, source), JSON_TOOLS, stream=True)
    whole, _ = run([text.encode()], JSON_TOOLS, stream=False)
    assert has_calls
    assert joined(streamed) == joined(whole)
    assert [json.loads(written) for _, written in joined(streamed)] == arguments
    assert content(streamed) == content(whole) == "so: "


@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_parts_join_to_the_whole_arguments_of_mistral_calls(
    arguments: list[dict[str, Any]], source: random.Random
) -> None:
    text = "[TOOL_CALLS]" + "".join(f"add[ARGS]{json.dumps(each)}" for each in arguments)
    streamed, has_calls = run(cut(text, source), MISTRAL, stream=True)
    whole, _ = run([text.encode()], MISTRAL, stream=False)
    assert has_calls
    assert joined(streamed) == joined(whole)
    assert [json.loads(written) for _, written in joined(streamed)] == arguments


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "between", ["[TOOL_CALLS]", "[TOOL_CALLS] ", "\n[TOOL_CALLS]", ", ", " and "]
)
def test_mistral_calls_that_each_have_their_marker_all_come(between: str, *, stream: bool) -> None:
    written = [f'add[ARGS]{{"n": {number}}}' for number in range(3)]
    text = "[TOOL_CALLS]" + between.join(written)
    for seed in range(5):
        events, has_calls = run(cut(text, random.Random(seed)), MISTRAL, stream=stream)
        assert joined(events) == [("add", f'{{"n": {number}}}') for number in range(3)]
        assert (content(events), has_calls) == ("", True)


def test_arguments_of_a_mistral_call_behind_its_own_marker_come_as_they_are_written() -> None:
    text = '[TOOL_CALLS]add[ARGS]{"n": 1}[TOOL_CALLS]add[ARGS]{"n": 2}'
    streamed, _ = run([char.encode() for char in text], MISTRAL, stream=True)
    parts = [delta.arguments for delta in calls(streamed)]
    assert parts == ["", *'{"n": 1}', "", *'{"n": 2}']


def test_arguments_come_as_they_are_written() -> None:
    text = json_call({"a": [1, 2], "b": "x"})
    streamed, _ = run([char.encode() for char in text], JSON_TOOLS, stream=True)
    parts = [delta.arguments for delta in calls(streamed)]
    assert parts == ["", *'{"a": [1, 2], "b": "x"}']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        '{"arguments": {"a": 1}, "name": "add"}',
        '{"name": "add", "arguments": "{}"}',
        '{"name": "\\u0061dd", "arguments": {}}',
        '{"id": "call_1", "name": "add", "arguments": {}}',
    ],
)
def test_a_call_in_another_order_comes_whole(body: str, stream: bool) -> None:
    events, has_calls = run([f"<tool_call>{body}</tool_call>".encode()], JSON_TOOLS, stream=stream)
    assert has_calls
    assert [name for name, _ in joined(events)] == ["add"]
    assert len(calls(events)) == 1


@pytest.mark.case("34")
@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1', '{"a": 1'),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\', '{"a": "'),
        ('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', '{"a": }'),
        ('<tool_call>{"name": "add", "arguments": {}} no</tool_call>', "{}"),
    ],
)
def test_parts_that_were_given_out_of_a_bad_call_stay_but_it_does_not_count(
    text: str, written: str
) -> None:
    streamed, has_calls = run([text.encode()], JSON_TOOLS, stream=True)
    assert joined(streamed) == [("add", written)]
    assert (content(streamed), has_calls) == ("", False)
    whole, _ = run([text.encode()], JSON_TOOLS, stream=False)
    assert (content(whole), calls(whole)) == (text, [])


def test_a_call_after_a_bad_one_has_an_index_of_its_own() -> None:
    bad = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'
    streamed, has_calls = run([(bad + json_call({"a": 1})).encode()], JSON_TOOLS, stream=True)
    assert joined(streamed) == [("add", '{"a": }'), ("add", '{"a": 1}')]
    assert has_calls


def test_what_never_becomes_a_call_is_text_in_a_stream_too() -> None:
    text = "<tool_call>" + "nonsense " * 300 + "</tool_call>"
    streamed, _ = run(cut(text, random.Random(1)), JSON_TOOLS, stream=True)
    assert (content(streamed), calls(streamed)) == (text, [])


# A call whose argument has not ended, in formats whose parsers read calls out of that all the same.
CUT_CALLS = {
    glm47: "add\n<arg_key>n</arg_key>\n<arg_value>1",
    kimi_k2: '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"n": 1',
    minicpm5: '"add"><param name="n">1',
    muse_spark: '<atem:invoke name="add"><atem:parameter name="n">1',
}


@pytest.mark.parametrize("family", CUT_CALLS, ids=lambda family: family.__name__.split(".")[-1])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_the_limit_or_a_stop_string_cuts_is_text(family: Any, *, stream: bool) -> None:
    tokenizer = FakeTokenizer(
        tool_parser=family.parse_tool_call,
        tool_call_start=family.tool_call_start,
        tool_call_end=family.tool_call_end,
    )
    begun = f"so: {family.tool_call_start}{CUT_CALLS[family]}"

    def told(pieces: list[bytes], *stop: str, is_cut: bool) -> tuple[str, bool]:
        plan = TextPlan(split_reasoning=True, tools=TOOLS, stop=stop, stream_calls=stream)
        assembly = TextAssembly(plan, ByteDecoder(pieces.__getitem__), tokenizer)
        events = [event for token in range(len(pieces)) for event in assembly.feed(token)]
        return content([*events, *assembly.finish(is_cut=is_cut)]), assembly.has_tool_calls

    assert told([begun.encode()], is_cut=True) == (begun, False)
    assert told([begun.encode(), b"ENDed"], "END", is_cut=False) == (begun, False)
    # A model that ends by itself may leave the closing marker out; it may be the stop string, too.
    assert told([begun.encode()], is_cut=False) == ("so: ", True)
    closing = family.tool_call_end
    assert told([begun.encode(), closing.encode()], closing, is_cut=False) == ("so: ", True)


def test_a_family_that_does_not_write_json_gives_its_calls_whole() -> None:
    tokenizer = FakeTokenizer(tool_parser=qwen3_coder.parse_tool_call)
    text = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    streamed, has_calls = run([char.encode() for char in text], tokenizer, stream=True)
    assert (len(calls(streamed)), has_calls) == (1, True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (JSON_TOOLS, json_call({"n": 1}) + "\n" + json_call({"n": 2})),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"n": 1}add[ARGS]{"n": 2}'),
    ],
    ids=["blocks", "one block"],
)
def test_where_one_call_is_allowed_no_other_is_given_out(
    tokenizer: FakeTokenizer, text: str, *, stream: bool
) -> None:
    for seed in range(20):
        pieces = cut(text, random.Random(seed))
        events, has_calls = run(pieces, tokenizer, stream=stream, one_call=True)
        assert has_calls, seed
        assert joined(events) == [("add", '{"n": 1}')], seed
        assert not content(events).strip(), seed
