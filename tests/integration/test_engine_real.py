"""The whole engine process with real tiny models, over its socket, without a supervisor."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_shared.config import EXIT_CANNOT_WORK, LIFELINE_EXIT_S, EngineSettings
from mlx_isolate_shared.wire import Failed, Loading, Prepare, Progress, Ready
from tests.engine_process import REAL, EngineProcess, served
from tests.material.models import PARROT, SLOW, ModelSpec
from tests.raw_http import RawClient, RawResponse, ask

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello there"}


@pytest.fixture(scope="module")
def parrot(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    """Answers that are known in advance."""
    yield from served(model_folder(PARROT))


@pytest.fixture(scope="module")
def slow(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    """Endless text, some ms a token."""
    yield from served(model_folder(SLOW))


def chat(engine: EngineProcess, *messages: dict[str, Any], **fields: Any) -> RawResponse:
    body = {"messages": list(messages) or [HELLO], "temperature": 0, "max_tokens": 16, **fields}
    return asyncio.run(ask(engine.socket_path, CHAT, body))


def text_of(response: RawResponse) -> str:
    return "".join(
        one["choices"][0]["delta"].get("content") or "" for one in response.data if one["choices"]
    )


def within(seconds: float, scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, seconds))


@pytest.mark.case("31", "40")
def test_stream_and_whole_answer_agree(slow: EngineProcess) -> None:
    whole = chat(slow).json
    streamed = chat(slow, stream=True, stream_options={"include_usage": True})
    assert text_of(streamed) == whole["choices"][0]["message"]["content"]
    assert streamed.data[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert streamed.data[-1]["usage"]["completion_tokens"] == 16
    assert streamed.data[-2]["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.case("31")
def test_parrot_repeats_and_stops_by_itself(parrot: EngineProcess) -> None:
    said = {"role": "assistant", "content": "Grüße 👋 日本, quux!"}
    for stream in (False, True):
        response = chat(parrot, HELLO, said, HELLO, max_tokens=200, stream=stream)
        if stream:
            text, reason = text_of(response), response.data[-1]["choices"][0]["finish_reason"]
        else:
            choice = response.json["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == (said["content"], "stop")


def test_stop_string_never_shows_in_part(parrot: EngineProcess) -> None:
    said = {"role": "assistant", "content": "one two three four"}
    response = chat(parrot, HELLO, said, HELLO, max_tokens=200, stream=True, stop=["thr", "zz"])
    assert text_of(response) == "one two "
    assert response.data[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.case("31")
def test_each_token_is_a_chunk_of_its_own(slow: EngineProcess) -> None:
    response = chat(slow, stream=True, max_tokens=10)
    assert all(chunk.count(b"data: ") == 1 for chunk in response.chunks)
    # A role, at most one chunk a token, a finish reason, [DONE].
    assert 6 <= len(response.chunks) <= 13


@pytest.mark.case("44")
def test_prompt_over_the_context_is_refused_before_headers(slow: EngineProcess) -> None:
    context = 2048
    for stream in (False, True):
        response = chat(slow, {"role": "user", "content": "x " * context * 20}, stream=stream)
        assert response.status == 400
        assert response.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.case("43")
def test_n_gives_that_many_choices(slow: EngineProcess) -> None:
    answer = chat(slow, n=3, seed=1, temperature=1).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    again = chat(slow, n=3, seed=1, temperature=1).json
    assert [one["message"] for one in again["choices"]] == [
        one["message"] for one in answer["choices"]
    ]


@pytest.mark.case("43")
def test_logprobs_join_to_the_content(slow: EngineProcess) -> None:
    choice = chat(slow, logprobs=True, top_logprobs=3).json["choices"][0]
    tokens = choice["logprobs"]["content"]
    joined = b"".join(bytes(token["bytes"]) for token in tokens)
    assert joined.decode() == choice["message"]["content"]
    for token in tokens:
        tops = [one["logprob"] for one in token["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert token["logprob"] <= 0


@pytest.mark.case("40")
def test_repeated_prompt_counts_its_cached_tokens(slow: EngineProcess) -> None:
    message = {"role": "user", "content": "a prompt of its own, to be cached"}
    first = chat(slow, message).json
    second = chat(slow, message).json
    assert (
        first["usage"]["prompt_tokens_details"]["cached_tokens"]
        < second["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


@pytest.mark.case("09")
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_stops_the_generation(slow: EngineProcess, stream: bool) -> None:
    before = slow.progress_now()
    body = {"messages": [HELLO], "max_tokens": 1900, "stream": stream}
    client = slow.begin_request(CHAT, body)
    slow.wait_progress(active=1)
    client.close()
    after = slow.wait_progress(5, active=0, queued=0, cancelled=before.cancelled + 1)
    assert after.generated_tokens - before.generated_tokens < 500
    later = slow.wait_report(Progress)
    assert later.generated_tokens == after.generated_tokens


@pytest.mark.case("03")
@pytest.mark.parametrize("phase", ["loading", "prefill", "decode"])
def test_end_of_the_lifeline_ends_a_real_engine(
    model_folder: Callable[[ModelSpec], Path], phase: str
) -> None:
    with EngineProcess(REAL) as engine:
        engine.start(str(model_folder(SLOW)))
        if phase == "loading":
            engine.wait_report(Loading)
        else:
            engine.wait_ready()
            content = "x " * 900 if phase == "prefill" else "x"
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1000}
            engine.begin_request(CHAT, {**body, "stream": True})
            engine.wait_progress(active=1)
        engine.close(engine.lifeline_fd)
        engine.wait_exit(LIFELINE_EXIT_S)


def test_sigterm_cuts_a_long_stream_with_an_error_event(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    with EngineProcess(REAL) as engine:
        engine.start(str(model_folder(SLOW)))
        engine.wait_ready()

        async def main() -> None:
            async with await RawClient.connect(engine.socket_path) as client:
                body = {"messages": [HELLO], "max_tokens": 100_000, "stream": True}
                client.send(CHAT, body)
                await client.head()
                events = [await client.chunk()]
                engine.child.terminate()
                while events[-1]:
                    events.append(await client.chunk())
                last = json.loads(events[-2][6:])
                # The context may end the stream before it is cut.
                assert "error" not in last or last["error"]["code"] == "engine_stopping"

        within(30, main())
        assert engine.wait_exit(10) == 0


@pytest.mark.parametrize(
    ("prepared", "expected"),
    [
        (None, True),
        (EngineSettings(), False),
        # Another template than the one that the start then asks for.
        (EngineSettings(chat_template="{{ messages[0].content }}"), True),
    ],
)
def test_standby_uses_the_tokenizer_that_it_loaded_ahead(
    model_folder: Callable[[ModelSpec], Path], prepared: EngineSettings | None, expected: bool
) -> None:
    folder = str(model_folder(PARROT))
    with EngineProcess(REAL) as engine:
        if prepared is None:
            engine.send(Prepare())
        else:
            engine.send(Prepare(model=folder, settings=prepared))
        engine.start(folder)
        stages: list[str] = []
        while not isinstance(report := engine.report(60), Ready):
            assert isinstance(report, Loading), engine.log
            stages.append(report.stage)
        assert ("tokenizer" in stages) is expected
        assert (
            chat(engine, {"role": "user", "content": "quux"}).json["choices"][0]["message"][
                "content"
            ]
            == "quux"
        )


def test_standby_survives_a_model_that_is_not_there(tmp_path: Path) -> None:
    with EngineProcess(REAL) as engine:
        engine.send(Prepare(model=str(tmp_path / "nothing")))
        engine.send(Prepare(model="demo", cache_home=str(tmp_path)))
        engine.close(engine.spec_fd)
        assert engine.wait_exit(60) == 0


def test_missing_model_exits_78_with_its_reason(tmp_path: Path) -> None:
    with EngineProcess(REAL) as engine:
        engine.start(str(tmp_path / "nothing"))
        assert engine.wait_report(Failed).code == "model_missing"
        assert engine.wait_exit(10) == EXIT_CANNOT_WORK
