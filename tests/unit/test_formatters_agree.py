"""Streamed and whole answers are two forms of one thing, for any order of events."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlx_isolate_engine.completion.events import ContentDelta, ReasoningDelta, ToolCallDelta
from mlx_isolate_engine.protocols import anthropic, chat, completions
from mlx_isolate_engine.protocols.contract import Delta, WireRequest
from mlx_isolate_engine.protocols.response_store import ResponseStore
from mlx_isolate_engine.protocols.responses import ResponsesProtocol
from mlx_isolate_engine.protocols.transcript import Transcript
from tests.fakes.scripted_service import CALL, summary

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
TEXTS = st.text(min_size=1, max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Reasoning, content and whole tool calls in pieces, as models mix them."""
    deltas: list[Delta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=8)):
        if kind == "call":
            arguments = json.dumps(draw(st.dictionaries(TEXTS, TEXTS, max_size=2)))
            cut = draw(st.integers(0, len(arguments)))
            first = arguments[:cut]
            deltas.append(ToolCallDelta(index=calls, id=f"c{calls}", name="f", arguments=first))
            deltas.append(ToolCallDelta(index=calls, arguments=arguments[cut:]))
            calls += 1
        else:
            make = ReasoningDelta if kind == "reasoning" else ContentDelta
            deltas += [make(text=text) for text in draw(st.lists(TEXTS, max_size=3))]
    return deltas


def streamed(request: WireRequest, deltas: Sequence[Delta]) -> list[Any]:
    """The payloads of all events, each of which is one whole SSE event."""
    streamer = request.streamer()
    events = [*streamer.begin(7)]
    for delta in deltas:
        events += streamer.delta(0, delta)
    events += [*streamer.finish(0, summary()), *streamer.end()]
    payloads = []
    for event in events:
        assert event.endswith(b"\n\n")
        assert event.count(b"\n\n") == 1
        data = event.decode().rstrip("\n").split("\n")[-1].removeprefix("data: ")
        if data != "[DONE]":
            payloads.append(json.loads(data))
    return payloads


def whole(request: WireRequest, deltas: Sequence[Delta]) -> Any:
    transcript = Transcript()
    for delta in deltas:
        transcript.add(delta)
    transcript.end(summary())
    return json.loads(request.body([transcript]))


@given(answers())
def test_chat(deltas: list[Delta]) -> None:
    request = chat.parse(json.dumps(MESSAGES).encode(), CALL)
    text, reasoning = "", ""
    calls: dict[int, dict[str, str]] = {}
    for payload in streamed(request, deltas):
        delta = payload["choices"][0]["delta"]
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"id": part.get("id", ""), "arguments": ""})
            call["arguments"] += part["function"]["arguments"]
    message = whole(request, deltas)["choices"][0]["message"]
    assert text == (message["content"] or "")
    assert reasoning == message.get("reasoning_content", "")
    assert [(call["id"], call["arguments"]) for call in calls.values()] == [
        (call["id"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]


@given(st.lists(TEXTS, max_size=4))
def test_completions(texts: list[str]) -> None:
    request = completions.parse(b'{"prompt":"p","echo":true}', CALL)
    deltas: list[Delta] = [ContentDelta(text=text) for text in texts]
    joined = "".join(payload["choices"][0]["text"] for payload in streamed(request, deltas))
    assert joined == whole(request, deltas)["choices"][0]["text"] == "p" + "".join(texts)


@given(answers())
def test_responses(deltas: list[Delta]) -> None:
    parse = ResponsesProtocol(ResponseStore()).parse
    told = streamed(parse(b'{"input":"hi"}', CALL), deltas)
    answer = whole(parse(b'{"input":"hi"}', CALL), deltas)
    assert told[-1]["response"] == answer
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert done == answer["output"]
    text = "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta")
    assert text == "".join(
        part["text"]
        for item in answer["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


@given(answers())
def test_anthropic(deltas: list[Delta]) -> None:
    request = anthropic.parse(json.dumps(MESSAGES).encode(), CALL)
    blocks: list[dict[str, Any]] = []
    json_parts: dict[int, str] = {}
    for one in streamed(request, deltas):
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append(one["content_block"])
        elif one["type"] == "content_block_delta":
            assert one["index"] == len(blocks) - 1
            delta = one["delta"]
            match delta["type"]:
                case "text_delta":
                    blocks[-1]["text"] += delta["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += delta["thinking"]
                case _:
                    parts = json_parts.get(one["index"], "") + delta["partial_json"]
                    json_parts[one["index"]] = parts
    for index, text in json_parts.items():
        blocks[index]["input"] = json.loads(text)
    assert blocks == whole(request, deltas)["content"]
