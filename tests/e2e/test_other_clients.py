"""Clients that people put on top of the official ones, and whole agent loops, over the daemon."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import langchain_openai
import openai
import pytest
from pydantic import SecretStr

from tests.material.models import ModelSpec
from tests.running_daemon import REAL, RunningDaemon, environment

KEY = SecretStr("none")
TOOL_PARROT = ModelSpec(kind="parrot", context=8192, template="tools")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def daemon(
    model_folder: Callable[[ModelSpec], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDaemon]:
    arguments = [str(model_folder(TOOL_PARROT)), "--served-model-name", "m"]
    home = tmp_path_factory.mktemp("daemon")
    with RunningDaemon(home, *arguments, program=REAL) as running:
        running.wait_state("ready", 0, 120)
        yield running


def test_langchain_invokes_streams_and_calls_tools(daemon: RunningDaemon) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=f"{daemon.url}/v1", api_key=KEY, model="m", temperature=0, stream_usage=True
    )
    answer = model.invoke("one two three")
    assert answer.content == "one two three"
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream("one two three"))
    assert "".join(str(chunk.content) for chunk in chunks) == "one two three"
    called = model.bind_tools([WEATHER]).invoke(CALL)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [
        ("get_weather", {"city": "Zürich"})
    ]


def test_langchain_completes_as_many_texts_as_it_sends_at_once(daemon: RunningDaemon) -> None:
    model = langchain_openai.OpenAI(
        base_url=f"{daemon.url}/v1", api_key=KEY, model="m", max_tokens=2, temperature=0
    )
    texts = [f"text {number}" for number in range(model.batch_size)]
    answers = model.generate(texts).generations
    assert len(answers) == len(texts) == 20
    assert all(answer[0].text for answer in answers)


def test_llm_prompts_and_streams(daemon: RunningDaemon, tmp_path: Path) -> None:
    settings = [
        {
            "model_id": "ours",
            "model_name": "m",
            "api_base": f"{daemon.url}/v1",
            "api_key_name": "ours",
        }
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(settings))
    for flags in ([], ["--no-stream"]):
        said = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "ours", "--key", "none", *flags, "one two three"],
            env=environment(tmp_path, {"LLM_USER_PATH": str(tmp_path)}),
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip() == "one two three"


def test_agent_loop_runs_a_tool_and_replays_its_result(daemon: RunningDaemon) -> None:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": CALL}]
        first = client.chat.completions.create(
            model="m", messages=messages, tools=[WEATHER], temperature=0
        )
        message = first.choices[0].message
        (call,) = message.tool_calls or []
        assert call.type == "function"
        messages.append(message.model_dump(exclude_none=True))
        city = json.loads(call.function.arguments)["city"]
        result = {"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"}
        messages += [result, {"role": "user", "content": "quux"}]
        second = client.chat.completions.create(
            model="m", messages=messages, tools=[WEATHER], temperature=0, max_tokens=40
        )
        assert second.usage is not None and first.usage is not None
        assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_anthropic_agent_loop_over_the_daemon(daemon: RunningDaemon) -> None:
    tool: Any = {
        "name": "get_weather",
        "description": "The weather.",
        "input_schema": WEATHER["function"]["parameters"],
    }
    with anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": CALL}]
        with client.messages.stream(
            model="m", max_tokens=200, messages=messages, tools=[tool]
        ) as stream:
            first = stream.get_final_message()
        (block,) = first.content
        assert block.type == "tool_use"
        messages.append({"role": "assistant", "content": first.content})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "go on"}]})
        second = client.messages.create(model="m", max_tokens=20, messages=messages, tools=[tool])
        assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > 0
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nope", max_tokens=5, messages=messages)


def test_asynchronous_clients_run_side_by_side_and_time_out(daemon: RunningDaemon) -> None:
    async def main() -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=daemon.url, api_key="none", max_retries=0) as other,
        ):
            message = asyncio.create_task(
                other.messages.create(
                    model="m", max_tokens=50, messages=[{"role": "user", "content": "quattro"}]
                )
            )
            words = ("uno", "dos", "tres")
            answers = await asyncio.gather(
                *(
                    one.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": word}], temperature=0
                    )
                    for word in words
                )
            )
            assert tuple(answer.choices[0].message.content for answer in answers) == words
            (block,) = (await message).content
            assert block.type == "text"
            assert block.text == "quattro"
            os.kill(engine, signal.SIGSTOP)
            with pytest.raises(openai.APITimeoutError):
                await one.with_options(timeout=0.05).chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "late"}]
                )

    engine = daemon.status()["models"][0]["pid"]
    try:
        asyncio.run(main())
    finally:
        os.kill(engine, signal.SIGCONT)


def test_embeddings_are_refused_over_the_daemon(daemon: RunningDaemon) -> None:
    with (
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="cannot make embeddings"),
    ):
        client.embeddings.create(model="m", input="x")
