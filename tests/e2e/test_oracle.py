"""Greedy text through the daemon is mlx-lm's own, alone and eight at once."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODELS, READY_DEADLINE_S
from tests.e2e.oracle import oracle
from tests.material.models import ModelSpec
from tests.running_daemon import REAL, RunningDaemon

# A greedy choice between tokens closer than this may fall either way in another batch.
NEAR_TIE = 1e-3
IDENTICAL_MIN = 0.95
TEXT = "the sea is wide and old ships sleep under it while gulls tell of storms to come"


def requests_of(count: int, max_tokens: int, words: str = TEXT) -> list[dict[str, Any]]:
    """Chat and text prompts of unequal lengths, one to `count` times that of `words`."""
    requests: list[dict[str, Any]] = []
    for n in range(count):
        text = (words[n:] + words[:n]) * (n + 1)
        if n % 2:
            requests.append({"prompt": text, "max_tokens": max_tokens})
        else:
            message = {"role": "user", "content": text}
            requests.append({"messages": [message], "max_tokens": max_tokens})
    return requests


def same_but_for_near_ties(text: str, expected: dict[str, Any]) -> bool:
    """Whether `text` is the oracle's; asserts that a difference begins at a near tie."""
    if text == expected["text"]:
        return True
    seen = ""
    for piece, gap in zip(expected["pieces"], expected["gaps"], strict=True):
        if not text.startswith(seen + piece):
            assert gap < NEAR_TIE, f"diverges at {seen!r}: {text!r} instead of {expected['text']!r}"
            return False
        seen += piece
    raise AssertionError(f"goes on after the oracle's end: {text!r}")


async def ask(client: httpx.AsyncClient, model: str, request: dict[str, Any]) -> str:
    chat = "messages" in request
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = await client.post(path, json={"model": model, "temperature": 0, **request})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"] if chat else choice["text"]
    return text or ""


async def ask_all(url: str, model: str, requests: list[dict[str, Any]], at_once: bool) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        if at_once:
            return list(await asyncio.gather(*(ask(client, model, one) for one in requests)))
        return [await ask(client, model, one) for one in requests]


def assert_same(texts: list[str], expected: list[dict[str, Any]]) -> None:
    same = [same_but_for_near_ties(*pair) for pair in zip(texts, expected, strict=True)]
    assert sum(same) >= IDENTICAL_MIN * len(same)


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_greedy_text_equals_mlx_lm(
    name: str, daemon: RunningDaemon, model_folder: Callable[[ModelSpec], Path]
) -> None:
    requests = requests_of(8, 48)
    expected = oracle(model_folder(MODELS[name]), requests)
    for at_once in (False, True):
        assert_same(asyncio.run(ask_all(daemon.url, name, requests, at_once)), expected)


@pytest.mark.demo
@pytest.mark.timeout(900)
def test_greedy_text_of_the_demo_model_equals_mlx_lm(
    demo_model: Path, demo_cache_home: Path, tmp_path: Path
) -> None:
    opening = "Once upon a time, in a small village by the sea,"
    requests = [{"prompt": opening, "max_tokens": 12}, *requests_of(7, 6, TEXT[:8])]
    expected = oracle(demo_model, requests)
    variables = {"MLX_ISOLATE_CACHE_DIR": str(demo_cache_home)}
    with RunningDaemon(tmp_path, "demo", program=REAL, variables=variables) as running:
        running.wait_state("ready", deadline_s=READY_DEADLINE_S)
        for at_once in (False, True):
            assert_same(asyncio.run(ask_all(running.url, "demo", requests, at_once)), expected)
