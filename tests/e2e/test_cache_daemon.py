"""The prompt cache behind the daemon: a stop, a kill of everything, and what that saves."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_isolate_supervisor.engines.blas import choose_blas
from tests.running_daemon import REAL, RunningDaemon
from tests.waiting import wait_for

READY_S = 120.0


def daemon(home: Path, model: Path, root: Path, *flags: str) -> RunningDaemon:
    words = [str(model), "--ssd-cache-dir", str(root), "--ssd-restore", "always", *flags]
    return RunningDaemon(home, *words, program=REAL)


def ask(served: RunningDaemon, text: str, count: int = 12) -> dict[str, Any]:
    message = [{"role": "user", "content": text}]
    answer = served.chat(messages=message, temperature=0, max_tokens=count)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: Mapping[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def assert_reused(answer: Mapping[str, Any]) -> None:
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1


def kill_everything(served: RunningDaemon) -> None:
    """SIGKILL to the daemon and its engines, all at once."""
    supervisor = psutil.Process(served.process.pid)
    everyone = [supervisor, *supervisor.children(recursive=True)]
    for process in everyone:
        os.kill(process.pid, signal.SIGKILL)
    served.process.wait(20)
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in everyone[1:]), 20)


@pytest.mark.case("20", "24")
@pytest.mark.parametrize("rows", ["1", "4"], ids=["one lane", "batched"])
def test_a_prompt_survives_a_stop_and_a_kill_of_everything(
    rows: str, sliding_model: Path, tmp_path: Path
) -> None:
    root, flags = tmp_path / "cache", ("--decode-concurrency", rows)
    with daemon(tmp_path / "a", sliding_model, root, *flags) as first:
        first.wait_state("ready", deadline_s=READY_S)
        cold = ask(first, "Kept through a stop of the daemon.")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait_end(60) == 0
    with daemon(tmp_path / "b", sliding_model, root, *flags) as second:
        second.wait_state("ready", deadline_s=READY_S)
        warm = ask(second, "Kept through a stop of the daemon.")
        assert_reused(warm)
        assert text_of(warm) == text_of(cold)
        other = ask(second, "Kept through a kill of everything.")
        model = second.status()["models"][0]["id"]
        assert second.ask("POST", "/models/unload", {"model": model}).status == 200
        unloaded = ask(second, "Kept through a kill of everything.")
        assert_reused(unloaded)
        assert text_of(unloaded) == text_of(other)
        flushed = second.ask("POST", "/admin/cache/flush?timeout_s=30")
        assert flushed.status == 200, flushed.body
        kill_everything(second)
    with daemon(tmp_path / "c", sliding_model, root, *flags) as third:
        third.wait_state("ready", deadline_s=READY_S)
        again = ask(third, "Kept through a kill of everything.")
        assert_reused(again)
        assert text_of(again) == text_of(other)


def first_token_s(served: RunningDaemon, text: str) -> tuple[float, str]:
    """Seconds from the request to its first content, and all content."""
    connection = served.connect()
    try:
        body = {
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 24,
            "stream": True,
        }
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        first, content = 0.0, ""
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if delta:
                first = first or time.perf_counter() - start
                content += delta
        return first, content
    finally:
        connection.close()


@pytest.mark.case("24")
@pytest.mark.alone
@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_gives_a_long_prompt_back_for_a_twentieth_of_its_prefill(
    demo_model: Path, tmp_path: Path
) -> None:
    if choose_blas("auto").path is None:
        pytest.skip("no optimized BLAS here: a prefill of the demo would take minutes")
    root = tmp_path / "cache"
    text = "The lighthouse keeper wrote down every ship that passed. " * 160
    with daemon(tmp_path / "a", demo_model, root) as first:
        first.wait_state("ready", deadline_s=READY_S)
        cold_s, cold = first_token_s(first, text)
        usage = ask(first, text, 24)
        assert usage["usage"]["prompt_tokens"] >= 1500
        step_s = usage["timings"]["predicted_ms"] / usage["timings"]["predicted_n"] / 1000
        assert first.ask("POST", "/admin/cache/flush?timeout_s=60").status == 200
        kill_everything(first)
    with daemon(tmp_path / "b", demo_model, root) as second:
        second.wait_state("ready", deadline_s=READY_S)
        warm_s, warm = first_token_s(second, text)
        assert warm == cold
        assert_reused(ask(second, text, 2))
        assert warm_s - step_s <= 0.05 * cold_s, (cold_s, warm_s, step_s)
