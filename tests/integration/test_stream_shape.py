"""Streams of the real engine as strict, naive and official clients read them."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlx_isolate_shared.config import EngineSettings
from tests.engine_process import EngineProcess, served
from tests.material.models import SLOW, ModelSpec, build_model
from tests.raw_http import RawClient, RawResponse, ask

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCRIPTS = "日本語 👩‍💻 ďábel 🇨🇿 🏳️‍🌈 שלום"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call>'

# Worded so that no seven of its tokens stand in the other: the parrot would mix the two up.
SECOND_CALL = (
    r'<tool_call>{"\u0061rgum\u0065nts":{"city":"Rome"},"n\u0061me":"weather"}</tool_call>'
)


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Repeats what the user says, tool calls too; its template lists no tools that it may mix up."""
    folder = tmp_path_factory.mktemp("parrot")
    build_model(folder, ModelSpec(kind="parrot", template="tools", context=8192))
    template = folder / "chat_template.jinja"
    text = template.read_text()
    begin, end = text.index("{%- if tools %}"), text.index("{% endif %}") + len("{% endif %}")
    template.write_text(text[:begin] + text[end:])
    yield from served(folder)


@pytest.fixture(scope="module")
def slow(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    """Some ms a token, and a comment after a short silence, so that the tests need not wait."""
    yield from served(model_folder(SLOW), EngineSettings(sse_ping_interval_s=0.05))


def post(engine: EngineProcess, path: str, body: dict[str, Any]) -> RawResponse:
    response = asyncio.run(asyncio.wait_for(ask(engine.socket_path, path, body), 60))
    assert response.status == 200, response.body
    return response


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def text_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": text, "temperature": 0, **fields}


def payloads(raw: bytes) -> list[str]:
    """What a parser that knows nothing but `data:` and blank lines reads; anything else fails."""
    lines = raw.decode().split("\n")
    assert lines[-2:] == ["", ""], "the last event is whole"
    assert all(line.startswith("data: ") for line in lines[:-2:2]), raw
    assert all(line == "" for line in lines[1::2]), raw
    return [line[6:] for line in lines[:-2:2]]


def events(raw: bytes) -> tuple[list[str], list[str]]:
    """Payloads and comments as the standard's parser reads them."""
    data: list[str] = []
    comments: list[str] = []
    for block in raw.decode().split("\n\n")[:-1]:
        lines = block.split("\n")
        if lines[0].startswith(":"):
            assert len(lines) == 1, "a comment is an event of its own"
            comments.append(lines[0])
        else:
            assert all(line.startswith("data:") for line in lines), block
            data.append("\n".join(line[5:].removeprefix(" ") for line in lines))
    return data, comments


def text_of_choice(choice: dict[str, Any]) -> str:
    text: str = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text


@pytest.mark.case("30", "31")
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("limit", [1, 5, 200], ids=["one", "five", "natural end"])
def test_a_stream_has_the_shape_that_clients_expect(
    parrot: EngineProcess, path: str, limit: int
) -> None:
    body = chat_body("quux and corge", max_tokens=limit)
    if path == TEXT:
        # What the template makes of that, so that it ends by itself too.
        body = text_body("<|bos|><|user|>quux and corge<|end|><|assistant|>", max_tokens=limit)
    whole = post(parrot, path, body).json["choices"][0]
    streamed = post(parrot, path, {**body, "stream": True})
    assert streamed.headers["content-type"].split(";")[0] == "text/event-stream"
    *found, done = payloads(streamed.body)
    assert done == "[DONE]"
    chunks = [json.loads(one) for one in found]
    assert len({(one["id"], one["created"], one["model"]) for one in chunks}) == 1
    choices = [one["choices"][0] for one in chunks]
    *before, last = [choice["finish_reason"] for choice in choices]
    assert set(before) <= {None}
    assert last == whole["finish_reason"] == ("stop" if limit == 200 else "length")
    if path == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
        assert not any("role" in choice["delta"] for choice in choices[1:])
    text = whole["message"]["content"] if path == CHAT else whole["text"]
    assert "".join(map(text_of_choice, choices)) == text
    assert text and (limit < 200 or text == "quux and corge")


@pytest.mark.case("31")
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.alone
def test_chunks_arrive_as_they_are_made(slow: EngineProcess, path: str) -> None:
    async def arrivals() -> list[float]:
        made: list[float] = []
        body = chat_body("on") if path == CHAT else text_body("on")
        async with await RawClient.connect(slow.socket_path) as client:
            client.send(path, {**body, "stream": True, "max_tokens": 40})
            await client.head()
            while chunk := await client.chunk():
                if chunk.startswith(b"data: {"):
                    made.append(time.perf_counter())
        return made

    times = asyncio.run(asyncio.wait_for(arrivals(), 60))
    assert len(times) >= 30
    apart = [later - earlier for earlier, later in pairwise(times)]
    # A token takes some ms; chunks of a burst come within some microseconds.
    assert sum(gap > 0.001 for gap in apart) >= len(apart) * 0.6, sorted(apart)


@pytest.mark.case("30")
def test_comments_stand_between_events_and_no_client_minds_them(slow: EngineProcess) -> None:
    body = chat_body("x " * 100, max_tokens=3, stream=True)
    data, comments = events(post(slow, CHAT, body).body)
    assert data[-1] == "[DONE]"
    assert comments and all(comment.startswith(": ") for comment in comments)
    with httpx.Client(transport=httpx.HTTPTransport(uds=slow.socket_path)) as over_socket:
        made: Any = openai.OpenAI
        client = made(base_url="http://engine/v1", api_key="none", http_client=over_socket)
        chunks = list(client.chat.completions.create(model="m", **body))
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.case("30")
def test_comments_can_be_switched_off(model_folder: Callable[[ModelSpec], Path]) -> None:
    for engine in served(model_folder(SLOW), EngineSettings(sse_ping_interval_s=0.0)):
        body = chat_body("x " * 50, max_tokens=3, stream=True)
        assert payloads(post(engine, CHAT, body).body)[-1] == "[DONE]"


@pytest.mark.case("32")
def test_scripts_cut_anywhere_are_the_same_in_a_stream(parrot: EngineProcess) -> None:
    for limit in range(1, 26):
        body = chat_body(SCRIPTS, max_tokens=limit)
        whole = post(parrot, CHAT, body).json["choices"][0]["message"]["content"]
        *found, _ = payloads(post(parrot, CHAT, {**body, "stream": True}).body)
        deltas = [text_of_choice(json.loads(one)["choices"][0]) for one in found]
        assert "".join(deltas) == whole
        # A replacement stands only where the limit cut a character, which is at the end.
        assert SCRIPTS.startswith(whole.removesuffix("\ufffd"))


@pytest.mark.case("34")
@pytest.mark.parametrize(
    ("said", "limit", "content", "is_call"),
    [
        (CALL, 200, "", True),
        (f"first this: {CALL}", 200, "first this: ", True),
        (CALL.replace("12", '"\\d+"'), 200, None, False),
        (CALL, 30, None, False),
        # What ends by itself within a call that is whole but for its mark is that call.
        (CALL.removesuffix("</tool_call>"), 200, "", True),
    ],
    ids=["good", "text before", "bad escape", "cut", "unclosed"],
)
def test_tool_calls_good_and_bad_are_the_same_in_a_stream(
    parrot: EngineProcess, said: str, limit: int, content: str | None, is_call: bool
) -> None:
    body = chat_body(said, tools=[ADD], max_tokens=limit)
    whole = post(parrot, CHAT, body).json["choices"][0]
    *found, _ = payloads(post(parrot, CHAT, {**body, "stream": True}).body)
    choices = [json.loads(one)["choices"][0] for one in found]
    parts = [part for one in choices for part in one["delta"].get("tool_calls") or []]
    streamed = "".join(map(text_of_choice, choices))
    if is_call:
        [call] = whole["message"]["tool_calls"]
        arguments = "".join(part["function"].get("arguments") or "" for part in parts)
        assert json.loads(call["function"]["arguments"]) == json.loads(arguments)
        assert json.loads(arguments) == {"a": 12, "b": 7}
        assert {part["index"] for part in parts} == {0}
        assert [part["id"] for part in parts if part.get("id")] != []
        assert streamed == (whole["message"]["content"] or "") == content
        assert whole["finish_reason"] == choices[-1]["finish_reason"] == "tool_calls"
    else:
        assert not whole["message"].get("tool_calls")
        assert said.startswith(whole["message"]["content"])
        assert "<tool_call>" in whole["message"]["content"]
        assert whole["finish_reason"] == choices[-1]["finish_reason"]
        assert whole["finish_reason"] == ("length" if limit == 30 else "stop")


@pytest.mark.case("34")
def test_two_tool_calls_in_a_row_stay_two_in_a_stream_as_well(parrot: EngineProcess) -> None:
    said = CALL + SECOND_CALL
    body = chat_body(said, tools=[ADD, WEATHER], max_tokens=300)
    whole = post(parrot, CHAT, body).json["choices"][0]
    *found, _ = payloads(post(parrot, CHAT, {**body, "stream": True}).body)
    choices = [json.loads(one)["choices"][0] for one in found]
    streamed: dict[int, list[Any]] = {}
    for part in (part for one in choices for part in one["delta"].get("tool_calls") or []):
        streamed.setdefault(part["index"], []).append(part)
    calls = [
        {
            "id": "".join(part.get("id") or "" for part in parts),
            "name": "".join(part["function"].get("name") or "" for part in parts),
            "arguments": "".join(part["function"].get("arguments") or "" for part in parts),
        }
        for _, parts in sorted(streamed.items())
    ]
    for made in (
        calls,
        [{"id": one["id"], **one["function"]} for one in whole["message"]["tool_calls"]],
    ):
        assert [(one["name"], json.loads(one["arguments"])) for one in made] == [
            ("add", {"a": 12, "b": 7}),
            ("weather", {"city": "Rome"}),
        ]
        assert len({one["id"] for one in made}) == 2
    assert "tool_call" not in "".join(map(text_of_choice, choices)) + (
        whole["message"]["content"] or ""
    )
    assert whole["finish_reason"] == choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.case("40")
@pytest.mark.parametrize(
    "ending",
    [
        ({"max_tokens": 3}, "length"),
        ({"max_tokens": 200}, "stop"),
        ({"max_tokens": 200, "stop": "corge"}, "stop"),
        ({"max_tokens": 200, "tools": [ADD]}, "tool_calls"),
    ],
    ids=["length", "end", "stop string", "tool call"],
)
@pytest.mark.parametrize(
    "options", [{"include_usage": True}, {"include_usage": False}, {}, None], ids=repr
)
def test_usage_comes_in_a_chunk_of_its_own_where_asked_for(
    parrot: EngineProcess, options: Any, ending: tuple[dict[str, Any], str]
) -> None:
    fields, reason = ending
    body = chat_body(CALL if "tools" in fields else "quux and corge", **fields)
    whole = post(parrot, CHAT, body).json
    streamed = post(parrot, CHAT, {**body, "stream": True, "stream_options": options})
    *found, done = payloads(streamed.body)
    chunks = [json.loads(one) for one in found]
    assert done == "[DONE]"
    if options and options.get("include_usage"):
        *chunks, extra = chunks
        assert extra["choices"] == []
        # The first answer was from a cold cache or a warm one, this one is from a warm one.
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert extra["usage"][name] == whole["usage"][name]
        assert extra["usage"]["completion_tokens"] <= fields["max_tokens"]
        assert extra["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all(chunk["choices"] for chunk in chunks)
    assert not any(chunk.get("usage") for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
