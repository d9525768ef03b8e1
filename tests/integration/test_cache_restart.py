"""The restart contract through the real engine: what was durable is there after any death."""

import asyncio
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_shared.config import EngineSettings
from tests.engine_process import REAL, EngineProcess
from tests.material.models import CACHE_KINDS, FULL, ModelSpec, build_model
from tests.raw_http import RawClient, RawResponse, ask

CHAT = "/v1/chat/completions"
Folder = Callable[[ModelSpec], Path]
# `--decode-concurrency`: 1 is the serial lane, more is the batch.
LANES = {"one lane": 1, "batched": 4}
# The usual run takes one model of each way of keeping state; the rest is the slow run.
USUAL = {("full", "batched"), ("sliding", "batched"), ("recurrent", "one lane")}
MATRIX = [
    pytest.param(kind, lane, marks=() if (kind, lane) in USUAL else pytest.mark.slow)
    for kind in CACHE_KINDS
    for lane in LANES
]


@contextmanager
def engine(folder: Path, root: Path | None, **settings: Any) -> Generator[EngineProcess]:
    given: dict[str, Any] = {"ssd_restore": "always", "ssd_cache_verify": True, **settings}
    directory = str(root) if root is not None else None
    with EngineProcess(REAL) as process:
        process.start(str(folder), EngineSettings(ssd_cache_dir=directory, **given))
        process.wait_ready()
        yield process


def call(process: EngineProcess, path: str, method: str = "GET") -> RawResponse:
    return asyncio.run(ask(process.socket_path, path, method=method))


def chat(process: EngineProcess, text: str, count: int = 12, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [
            {"role": "system", "content": "You are a test of the prompt cache. " * 2},
            {"role": "user", "content": text},
        ],
        "temperature": 0,
        "max_tokens": count,
        **fields,
    }
    response = asyncio.run(ask(process.socket_path, CHAT, body))
    assert response.status == 200, response.body
    answer: dict[str, Any] = response.json
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer.get("timings", {}).get("cache_n", tokens) == tokens
    return tokens


def prompt_tokens(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens"]
    return tokens


def flush(process: EngineProcess) -> dict[str, Any]:
    response = call(process, "/admin/cache/flush?timeout_s=30", "POST")
    evidence: dict[str, Any] = response.json
    assert response.status == 200, evidence
    assert evidence["pending_snapshots"] == 0
    assert evidence["pending_spills"] == 0
    assert evidence["failed_writes"] == 0
    return evidence


def kill(process: EngineProcess) -> None:
    process.child.send_signal(signal.SIGKILL)
    process.wait_exit(20)


def stats(process: EngineProcess) -> dict[str, Any]:
    figures: dict[str, Any] = call(process, "/v1/cache/stats").json
    return figures


@pytest.mark.case("24")
@pytest.mark.parametrize(("kind", "lane"), MATRIX)
def test_an_exact_repeat_comes_back_after_a_kill_and_after_a_stop(
    kind: str, lane: str, model_folder: Folder, tmp_path: Path
) -> None:
    folder, root = model_folder(CACHE_KINDS[kind]), tmp_path / "cache"
    rows = {"decode_concurrency": LANES[lane]}
    with engine(folder, root, **rows) as first:
        cold = chat(first, "What is kept?")
        other_cold = chat(first, "And what is not?", 20)
        longest = prompt_tokens(other_cold)
        evidence = flush(first)
        assert evidence["longest_durable_prefix"] >= longest - 1
        kill(first)
    with engine(folder, root, **rows) as second:
        assert stats(second)["ssd_entries"] == evidence["entries"], "all were found at the start"
        warm = chat(second, "What is kept?")
        assert cached(warm) >= prompt_tokens(warm) - 1
        assert text_of(warm) == text_of(cold)
        assert warm["timings"]["cache_tier"] == "ssd"
        assert warm["timings"]["cache_reason"] == "always"
        assert stats(second)["restores"] == 1
        late = chat(second, "Written only at the end", 9)
        second.child.send_signal(signal.SIGTERM)
        assert second.wait_exit(40) == 0
        assert "cache.closed lost=0" in second.log
    with engine(folder, root, **rows) as third:
        for text, before, count in (
            ("And what is not?", other_cold, 20),
            ("Written only at the end", late, 9),
        ):
            again = chat(third, text, count)
            assert cached(again) >= prompt_tokens(again) - 1
            assert text_of(again) == text_of(before)
        assert not list(root.rglob("*.tmp"))


def test_without_the_flag_nothing_of_the_tier_runs(full_model: Path, tmp_path: Path) -> None:
    with engine(full_model, None) as process:
        first = chat(process, "hello")
        assert text_of(chat(process, "hello")) == text_of(first)
        figures = stats(process)
        assert figures["ssd_enabled"] is False
        assert (figures["hits"], figures["restores"], figures["pending_snapshots"]) == (1, 0, 0)
        refused = call(process, "/admin/cache/flush", "POST")
        assert refused.status == 409
        assert refused.json["error"]["code"] == "ssd_cache_disabled"
        threads = os.listdir(f"/proc/{process.child.pid}/task") if os.path.isdir("/proc") else []
        names = [
            Path(f"/proc/{process.child.pid}/task/{thread}/comm").read_text() for thread in threads
        ]
        assert not any("cache-writer" in name for name in names)


def test_replaced_weights_are_a_miss_and_a_right_answer(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    folder = build_model(tmp_path / "model", FULL)
    with engine(folder, root) as first:
        old = chat(first, "hello")
        flush(first)
    replacement = build_model(tmp_path / "other", replace(FULL, seed=5))
    weights = folder / "model.safetensors"
    times = weights.stat()
    weights.write_bytes((replacement / "model.safetensors").read_bytes())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with engine(folder, root) as second:
        assert stats(second)["ssd_entries"] == 0
        new = chat(second, "hello")
        assert cached(new) == 0
        assert text_of(new) != text_of(old)
    with engine(replacement, None) as cold:
        assert text_of(chat(cold, "hello")) == text_of(new)


def test_a_flush_during_a_stream_waits_for_it_and_does_not_slow_the_others(
    slow_model: Path, tmp_path: Path
) -> None:
    with engine(slow_model, tmp_path / "cache") as process:
        chat(process, "to be made durable")

        async def scenario() -> None:
            async with await RawClient.connect(process.socket_path) as client:
                message = {"role": "user", "content": "on and on"}
                body = {"messages": [message], "stream": True, "max_tokens": 2000}
                client.send(CHAT, body)
                await client.head()
                await client.chunk()
                waiting = await ask(
                    process.socket_path, "/admin/cache/flush?timeout_s=0.3", method="POST"
                )
                assert waiting.status == 503
                assert waiting.json["durable"] is False
                await client.chunk()
                late = asyncio.create_task(
                    ask(process.socket_path, "/admin/cache/flush?timeout_s=30", method="POST")
                )
                for _ in range(20):
                    assert await client.chunk()
            done = await late  # the client has gone, so the stream ends, and the flush completes
            assert done.status == 200
            assert done.json["durable"] is True

        asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_wrong_timeout_is_refused(full_model: Path, tmp_path: Path) -> None:
    with engine(full_model, tmp_path / "cache") as process:
        for text in ("x", "-1", "nan", "1e9"):
            refused = call(process, f"/admin/cache/flush?timeout_s={text}", "POST")
            assert refused.status == 400
            assert refused.json["error"]["param"] == "timeout_s"
        chat(process, "hello")
        flush(process)  # by then the completion has been kept
        assert [e["kind"] for e in call(process, "/v1/cache").json["data"]] == ["assistant"]
        assert call(process, "/v1/cache", "DELETE").json["cleared"] >= 1
        assert call(process, "/v1/cache").json["data"] == []
