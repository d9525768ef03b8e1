"""The official OpenAI client, unmodified, against the daemon."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.running_daemon import RunningDaemon
from tests.waiting import wait_for

PARROT_TURNS: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "say it"},
    {"role": "assistant", "content": "The gulls are loud today."},
    {"role": "user", "content": "again"},
]
LONG = 4000


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_answers_with_exact_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="parrot", messages=PARROT_TURNS, temperature=0)
    assert answer.choices[0].message.content == "The gulls are loud today."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="parrot",
        messages=PARROT_TURNS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The gulls are loud today."
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert not chunks[-1].choices
    assert len(chunks) > 2


@pytest.mark.case("09")
def test_leaving_a_stream_ends_its_generation(daemon: RunningDaemon, client: openai.OpenAI) -> None:
    def slow() -> dict[str, int]:
        status = next(m for m in daemon.status()["models"] if m["id"] == "slow")
        progress: dict[str, int] = status["progress"]
        return progress

    # Other tests have asked this engine too.
    before = slow()
    with client.chat.completions.create(
        model="slow",
        messages=[{"role": "user", "content": "go on"}],
        max_tokens=LONG,
        stream=True,
    ) as stream:
        for _, _ in zip(range(10), stream, strict=False):
            pass

    def is_cancelled() -> bool:
        now = slow()
        return now["active"] == 0 and now["cancelled"] > before["cancelled"]

    wait_for(is_cancelled, 2.0, "it is cancelled")
    assert slow()["generated_tokens"] - before["generated_tokens"] < LONG


def test_an_unknown_model_is_the_clients_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="parrot") as raised:
        client.chat.completions.create(model="nope", messages=PARROT_TURNS)
    assert raised.value.code == "model_not_found"


def test_a_wrong_field_is_the_clients_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="parrot", messages=PARROT_TURNS, temperature=-1)
    assert raised.value.param == "temperature"


@pytest.mark.case("44")
def test_a_prompt_beyond_the_context_is_refused_before_any_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="full", prompt="x" * 5000, stream=True)
    assert raised.value.code == "context_length_exceeded"


def test_models_are_listed_as_the_client_types_them(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["full", "sliding", "parrot", "slow"]
    assert client.models.retrieve("slow").object == "model"
