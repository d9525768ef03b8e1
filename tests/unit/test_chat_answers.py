"""The chat protocol's answers, streamed and whole: golden bytes."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_isolate_engine.completion.events import (
    ContentDelta,
    ReasoningDelta,
    TokenLogprob,
    ToolCallDelta,
)
from mlx_isolate_engine.protocols import chat
from mlx_isolate_engine.protocols.contract import Delta
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.errors import EngineError
from tests.fakes.scripted_service import summary
from tests.material.chat_requests import TOOL, parse_all


def stream(request: chat.ChatRequest, deltas: Sequence[Delta], **ending: Any) -> list[Any]:
    streamer = request.streamer()
    events = [*streamer.begin(7)]
    for delta in deltas:
        events += streamer.delta(0, delta)
    events += streamer.finish(0, summary(**ending))
    events += streamer.end()
    assert events.pop() == b"data: [DONE]\n\n"
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def whole(request: chat.ChatRequest, deltas: Sequence[Delta], **ending: Any) -> Any:
    transcripts = []
    for _ in request.completions:
        transcript = Transcript()
        for delta in deltas:
            transcript.add(delta)
        transcript.end(summary(**ending))
        transcripts.append(transcript)
    return json.loads(request.body(transcripts))


@pytest.mark.case("31")
def test_stream_is_byte_for_byte_as_documented() -> None:
    streamer = parse_all(stream=True).streamer()
    events = [
        *streamer.begin(7),
        *streamer.delta(0, ContentDelta(text='é"\n')),
        *streamer.finish(0, summary("length")),
        *streamer.end(),
    ]
    head = (
        b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":2,"model":"m",'
        b'"system_fingerprint":"fp_0","choices":[{"index":0,"delta":'
    )
    assert events[0] == (
        head + b'{"role":"assistant","content":"","refusal":null},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert events[1] == (
        head + '{"content":"é\\"\\n"},"logprobs":null,"finish_reason":null}]}\n\n'.encode()
    )
    assert events[2].startswith(head + b'{},"logprobs":null,"finish_reason":"length"}],"timings":{')
    assert events[3:] == [b"data: [DONE]\n\n"]


@pytest.mark.case("31")
def test_role_comes_first_and_once() -> None:
    chunks = stream(parse_all(stream=True), [ContentDelta(text="a"), ContentDelta(text="b")])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.case("40")
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_chunk_unless_asked_for(options: Any) -> None:
    chunks = stream(parse_all(stream=True, stream_options=options), [ContentDelta(text="a")])
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.case("40")
def test_usage_chunk_has_no_choices_and_comes_last() -> None:
    request = parse_all(stream=True, stream_options={"include_usage": True})
    chunks = stream(request, [ContentDelta(text="a")])
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_the_fingerprint_changes_with_the_adapter() -> None:
    marks = {
        whole(parse_all(adapters=name), [ContentDelta(text="a")])["system_fingerprint"]
        for name in (None, "polite", "terse")
    }
    assert len(marks) == 3


def test_whole_answer_has_usage_timings_and_fingerprint() -> None:
    answer = whole(parse_all(), [ContentDelta(text="a"), ContentDelta(text="b")])
    assert answer["object"] == "chat.completion"
    assert answer["system_fingerprint"] == "fp_0"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert answer["timings"]["predicted_n"] == 3
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_reasoning_has_both_names() -> None:
    deltas: list[Delta] = [ReasoningDelta(text="hm"), ContentDelta(text="a")]
    chunk = stream(parse_all(stream=True), deltas)[1]
    assert chunk["choices"][0]["delta"] == {"reasoning": "hm", "reasoning_content": "hm"}
    message = whole(parse_all(), deltas)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"


@pytest.mark.case("34")
def test_tool_calls_stream_with_index_and_id_and_join_to_the_whole() -> None:
    deltas = [
        ToolCallDelta(index=0, id="call_a", name="f", arguments=""),
        ToolCallDelta(index=0, arguments='{"x":'),
        ToolCallDelta(index=0, arguments="1}"),
        ToolCallDelta(index=1, id="call_b", name="g", arguments="{}"),
    ]
    chunks = stream(parse_all(stream=True, tools=[TOOL]), deltas, finish_reason="tool_calls")
    parts = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks[1:-1]]
    assert parts[0] == {
        "index": 0,
        "id": "call_a",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert parts[1] == {"index": 0, "function": {"arguments": '{"x":'}}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = whole(parse_all(tools=[TOOL]), deltas)["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"x":1}', "{}"]


@pytest.mark.case("43")
def test_logprobs_have_bytes_and_alternatives() -> None:
    other = TokenLogprob(token="b", raw=b"b", logprob=-2.0)
    token = TokenLogprob(token="é", raw="é".encode(), logprob=-0.5, top=(other,))
    deltas = [ContentDelta(text="é", logprobs=(token,))]
    expected = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
    }
    request = parse_all(logprobs=True, top_logprobs=1, stream=True)
    chunk = stream(request, deltas)[1]
    assert chunk["choices"][0]["logprobs"] == {"content": [expected], "refusal": None}
    choice = whole(request, deltas)["choices"][0]
    assert choice["logprobs"]["content"] == [expected]


@pytest.mark.case("43")
def test_n_gives_each_choice_its_index() -> None:
    request = parse_all(n=3, seed=5)
    assert [one.sampling.seed for one in request.completions] == [5, 6, 7]
    answer = whole(request, [ContentDelta(text="a")])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 9


def test_error_event_has_the_envelope_and_no_finish_reason() -> None:
    event = parse_all(stream=True).streamer().error(EngineError("No.", status=500, code="x"))
    assert json.loads(event.removeprefix(b"data: ")) == {
        "error": {"message": "No.", "type": "server_error", "param": None, "code": "x"}
    }


def test_forbidden_token_has_a_finite_logprob() -> None:
    other = TokenLogprob(token="b", raw=b"b", logprob=float("-inf"))
    token = TokenLogprob(token="a", raw=b"a", logprob=0.0, top=(other,))
    answer = whole(parse_all(logprobs=True), [ContentDelta(text="a", logprobs=(token,))])
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"][0]["logprob"] == -9999.0
