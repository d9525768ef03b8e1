"""The official OpenAI and Anthropic clients, unmodified, against a real engine's socket."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from mlx_isolate_shared.wire import Progress
from tests.engine_process import EngineProcess, served
from tests.material.models import SLOW, ModelSpec

TOOL_PARROT = ModelSpec(kind="parrot", context=8192, template="tools")
THINKING_PARROT = ModelSpec(kind="parrot", context=8192, template="thinking")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CHAT_TOOL: Any = {"type": "function", "function": WEATHER}
RESPONSE_TOOL: Any = {"type": "function", "strict": False, **WEATHER}


@pytest.fixture(scope="module")
def parrot(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    yield from served(model_folder(TOOL_PARROT))


@pytest.fixture(scope="module")
def slow(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    yield from served(model_folder(SLOW))


def transport(engine: EngineProcess) -> httpx2.Client:
    return httpx2.Client(transport=httpx2.HTTPTransport(uds=engine.socket_path))


@pytest.fixture
def parrot_openai(parrot: EngineProcess) -> Iterator[openai.OpenAI]:
    yield from openai_client(parrot)


@pytest.fixture
def slow_openai(slow: EngineProcess) -> Iterator[openai.OpenAI]:
    yield from openai_client(slow)


def openai_client(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url="http://engine/v1", api_key="none", http_client=transport(engine), max_retries=0
    ) as client:
        yield client


@pytest.fixture
def parrot_anthropic(parrot: EngineProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url="http://engine", api_key="none", http_client=transport(parrot), max_retries=0
    ) as client:
        yield client


def test_openai_chat(parrot_openai: openai.OpenAI) -> None:
    answer = parrot_openai.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Grüße 👋"}], temperature=0
    )
    assert answer.choices[0].message.content == "Grüße 👋"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_openai_stream(parrot_openai: openai.OpenAI) -> None:
    text, usage = "", None
    with parrot_openai.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "one two three"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        for chunk in chunks:
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
    assert text == "one two three"
    assert usage is not None
    assert usage.completion_tokens > 0


def test_openai_stream_helper_accumulates_tool_calls(parrot_openai: openai.OpenAI) -> None:
    with parrot_openai.chat.completions.stream(
        model="m",
        messages=[{"role": "user", "content": CALL}],
        tools=[CHAT_TOOL],
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert final.choices[0].finish_reason == "tool_calls"
    assert not final.choices[0].message.content


def test_openai_abort_stops_the_generation(slow: EngineProcess, slow_openai: openai.OpenAI) -> None:
    before = slow.progress_now()
    with slow_openai.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], max_tokens=20_000, stream=True
    ) as chunks:
        for _, _ in zip(range(5), chunks, strict=False):
            pass
    after = slow.wait_progress(5, active=0, cancelled=before.cancelled + 1)
    assert slow.wait_report(Progress).generated_tokens == after.generated_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_openai_errors_are_typed(slow_openai: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        slow_openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], max_tokens=0, stream=stream
        )
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as too_long:
        slow_openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x " * 80_000}], stream=stream
        )
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        slow_openai.models.retrieve("nothing")


def test_openai_completions_and_models(slow_openai: openai.OpenAI) -> None:
    answer = slow_openai.completions.create(model="m", prompt="abc", max_tokens=4, logprobs=2)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 4
    assert [model.id for model in slow_openai.models.list()] == ["m"]


def test_openai_embeddings_are_refused(slow_openai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot make embeddings"):
        slow_openai.embeddings.create(model="m", input="x")


def test_openai_responses(parrot_openai: openai.OpenAI) -> None:
    first = parrot_openai.responses.create(model="m", input="Grüße 👋", temperature=0)
    assert first.output_text == "Grüße 👋"
    assert first.status == "completed"
    second = parrot_openai.responses.create(
        model="m", input="Grüße 👋", previous_response_id=first.id, temperature=0
    )
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    # The client asks for page after page until there is no more.
    items = list(parrot_openai.responses.input_items.list(second.id, limit=1, order="asc"))
    assert [item.type for item in items] == ["message"] * 3
    assert items[1] == first.output[0]


def test_openai_responses_stream_with_tool(parrot_openai: openai.OpenAI) -> None:
    with parrot_openai.responses.stream(
        model="m",
        input=CALL,
        tools=[RESPONSE_TOOL],
        temperature=0,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Zürich"}


def test_anthropic_message(parrot_anthropic: anthropic.Anthropic) -> None:
    message = parrot_anthropic.messages.create(
        model="m", max_tokens=100, messages=[{"role": "user", "content": "one two three"}]
    )
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "one two three"
    assert message.stop_reason == "end_turn"


def test_anthropic_stream_with_tool(parrot_anthropic: anthropic.Anthropic) -> None:
    tool: Any = {
        "name": "get_weather",
        "description": "The weather.",
        "input_schema": WEATHER["parameters"],
    }
    with parrot_anthropic.messages.stream(
        model="m", max_tokens=200, messages=[{"role": "user", "content": CALL}], tools=[tool]
    ) as stream:
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use"
    assert block.input == {"city": "Zürich"}
    assert final.stop_reason == "tool_use"


def test_anthropic_stop_sequence_count_and_errors(parrot_anthropic: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "one two three"}]}
    message = parrot_anthropic.messages.create(max_tokens=100, stop_sequences=["thr"], **asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "thr")
    counted = parrot_anthropic.messages.count_tokens(**asked)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError):
        parrot_anthropic.messages.create(max_tokens=0, **asked)


def test_thinking_shows_in_every_protocol(model_folder: Callable[[ModelSpec], Path]) -> None:
    said = "<think>\nhmm</think>Yes, quux."
    for engine in served(model_folder(THINKING_PARROT)):
        for client in openai_client(engine):
            chat = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": said}], temperature=0
            )
            message = chat.choices[0].message
            assert message.content is not None
            assert message.content.strip() == "Yes, quux."
            assert "hmm" in message.model_dump()["reasoning_content"]
            response = client.responses.create(model="m", input=said, temperature=0)
            assert [item.type for item in response.output] == ["reasoning", "message"]
        with anthropic.Anthropic(
            base_url="http://engine", api_key="none", http_client=transport(engine)
        ) as other:
            answer = other.messages.create(
                model="m", max_tokens=100, messages=[{"role": "user", "content": said}]
            )
            assert [block.type for block in answer.content] == ["thinking", "text"]
