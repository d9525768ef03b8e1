"""Answers through the real engine do not depend on what was asked, cut off or killed before."""

import asyncio
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_shared.config import EngineSettings
from tests.engine_process import REAL, EngineProcess
from tests.material.models import CACHE_KINDS, ModelSpec
from tests.raw_http import RawClient, ask

CHAT = "/v1/chat/completions"
SEED = 6
Folder = Callable[[ModelSpec], Path]
# About 1,500 tokens, which every question shares.
SYSTEM = " ".join(f"Fact {number}: what is asked for twice is told twice." for number in range(34))
KINDS = [
    pytest.param(kind, marks=() if kind == "full" else pytest.mark.slow) for kind in CACHE_KINDS
]


def questions() -> list[str]:
    """Pairs that differ only at the end, pairs of which one begins the other, and strangers."""
    return [
        "The canary is red. Which colour?",
        "The canary is red. Which colour!",
        "The canary is red. Which colour? And why is that so?",
        "The canary is blue. Which colour?",
        "A parrot.",
        "A parrot. A parrot. A parrot.",
        "The canary sings at noon. When does it sing?",
        "What is the first of the facts?",
    ]


class Talk:
    """An engine that can be killed and started again over the same directory."""

    def __init__(self, folder: Path, root: Path | None, **settings: Any) -> None:
        self.folder = folder
        given: dict[str, Any] = {"ssd_restore": "always", **settings}
        self.settings = EngineSettings(
            ssd_cache_dir=str(root) if root else None,
            prompt_cache_size=given.pop("prompt_cache_size", 10),
            **given,
        )
        self.process = self._start()

    def _start(self) -> EngineProcess:
        process = EngineProcess(REAL)
        self.is_closed = False
        process.start(str(self.folder), self.settings)
        process.wait_ready()
        return process

    def kill_and_restart(self) -> None:
        self.process.child.send_signal(signal.SIGKILL)
        self.close()
        self.process = self._start()

    def close(self) -> None:
        """End the engine; harmless when it has ended."""
        if not self.is_closed:
            self.is_closed = True
            self.process.__exit__(None, None, None)

    def body(self, text: str, count: int, **fields: Any) -> dict[str, Any]:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        messages = [{"role": "system", "content": SYSTEM}, *messages]
        return {"messages": messages, "temperature": 0, "max_tokens": count, **fields}

    def answer(self, text: str, count: int = 8, **fields: Any) -> dict[str, Any]:
        """The whole answer."""
        body = self.body(text, count, **fields)
        response = asyncio.run(ask(self.process.socket_path, CHAT, body))
        assert response.status == 200, response.body
        found: dict[str, Any] = response.json
        return found

    def ask(self, text: str, count: int = 8, **fields: Any) -> tuple[str, int]:
        """The answer's text and how many prompt tokens came from the cache."""
        answer = self.answer(text, count, **fields)
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached

    def cut_off(self, text: str, chunks: int) -> str:
        """Stream, leave after so many events (0 = while the prompt runs); the text so far."""

        async def scenario() -> str:
            seen = ""
            async with await RawClient.connect(self.process.socket_path) as client:
                client.send(CHAT, self.body(text, 400, stream=True))
                for _ in range(chunks + 1 if chunks else 0):
                    if not seen:
                        await client.head()
                    seen += (await client.chunk()).decode()
            return seen

        return asyncio.run(asyncio.wait_for(scenario(), 60))

    def call(self, path: str, method: str = "GET") -> Any:
        response = asyncio.run(ask(self.process.socket_path, path, method=method))
        return response.json

    def flush(self) -> None:
        evidence = self.call("/admin/cache/flush?timeout_s=60", "POST")
        assert evidence["durable"], evidence


Start = Callable[..., Talk]


@pytest.fixture
def start() -> Iterator[Start]:
    talks: list[Talk] = []

    def build(folder: Path, root: Path | None, **settings: Any) -> Talk:
        talks.append(Talk(folder, root, **settings))
        return talks[-1]

    yield build
    for talk in talks:
        talk.close()


@pytest.mark.case("06")
@pytest.mark.parametrize("kind", KINDS)
def test_every_order_and_every_kill_gives_the_answers_of_a_cold_engine(
    kind: str, model_folder: Folder, tmp_path: Path, start: Start
) -> None:
    asked = questions()
    folder = model_folder(CACHE_KINDS[kind])
    cold = start(folder, None, prompt_cache_size=0)
    expected = {text: cold.ask(text)[0] for text in asked}
    cold.close()
    warm = start(folder, tmp_path / "cache")
    orders = [asked, asked[::-1]]
    source = random.Random(SEED)
    orders += [source.sample(asked, len(asked)) for _ in range(3)]
    for number, order in enumerate(orders):
        for text in order:
            answer, cached = warm.ask(text)
            assert answer == expected[text], f"{text!r} in {order}"
            assert cached > 0 or number == 0, "no hit, so this proves nothing"
        # The usual run saves two starts of an engine; the slow one dies after every order.
        if kind != "full" or number in (1, len(orders) - 1):
            warm.flush()
            warm.kill_and_restart()
    assert warm.ask(asked[0])[1] > 0
    assert warm.call("/v1/cache/stats")["restores"] > 0


@pytest.mark.case("08")
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_cut_off_does_not_poison_what_comes_after(
    kind: str, model_folder: Folder, tmp_path: Path, start: Start
) -> None:
    folder = model_folder(CACHE_KINDS[kind])
    text = questions()[0]
    turn = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "It is"},
        {"role": "user", "content": "Go on."},
    ]
    cold = start(folder, None, prompt_cache_size=0)
    longer = text + " Once more, and longer than before."
    expected, expected_turn = cold.ask(text)[0], cold.ask("", messages=turn)[0]
    expected_longer = cold.ask(longer)[0]
    cold.close()
    warm = start(folder, tmp_path / "cache")
    assert "data:" in warm.cut_off(text, 5)
    assert warm.ask(text)[0] == expected
    assert warm.ask("", messages=turn)[0] == expected_turn
    for _ in range(3):
        warm.cut_off(longer, 0)
    assert warm.ask(text)[0] == expected
    assert warm.ask(longer)[0] == expected_longer
    warm.cut_off(text, 3)
    warm.flush()
    warm.kill_and_restart()
    answer, cached = warm.ask(text)
    assert answer == expected
    assert cached > 0
    assert warm.ask("", messages=turn)[0] == expected_turn


@pytest.mark.case("22")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("prompts", [10, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's files")
def test_a_disk_that_fills_up_costs_no_answer_and_writes_resume(
    full_model: Path, tmp_path: Path, start: Start, prompts: int
) -> None:
    root = tmp_path / "cache"
    cold = start(full_model, None, prompt_cache_size=0)
    asked = [f"Prompt number {number}." for number in range(prompts)]
    expected = [cold.ask(text)[0] for text in asked]
    cold.close()
    warm = start(full_model, root, ssd_cache_verify=True, prompt_cache_size=50)
    pid = warm.process.child.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (60_000, hard))
    for _ in range(2):
        assert [warm.ask(text)[0] for text in asked] == expected
    evidence = warm.call("/admin/cache/flush?timeout_s=30", "POST")
    assert evidence["durable"] is False
    assert evidence["failed_writes"] >= prompts
    assert not list(root.rglob("*.safetensors")) and not list(root.rglob("*.tmp"))
    assert warm.process.log.count("cache.write_failed") == 1
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    warm.flush()
    warm.kill_and_restart()
    assert warm.call("/v1/cache/stats")["ssd_entries"] == prompts
    for text, answer in zip(asked, expected, strict=True):
        again, cached = warm.ask(text)
        assert again == answer
        assert cached > 0
