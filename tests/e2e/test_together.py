"""Many clients of one model at once: no answer leaks into another, and who leaves harms nobody."""

import json
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.running_daemon import RunningDaemon, read_until
from tests.waiting import wait_for

AT_ONCE = 16
IDLE_SHARE = 0.1


def model(daemon: RunningDaemon, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in daemon.status()["models"] if m["id"] == name)
    return found


def data_of(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each event of a stream read raw (one chunk an event)."""
    lines = raw.split(b"\r\n\r\n", 1)[1].decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def streamed_text(raw: bytes) -> str:
    events = data_of(raw)
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events)


def say(daemon: RunningDaemon, word: str, filler: str, stream: bool) -> tuple[str, str, int]:
    """Ask the parrot, which tells what it was told before; text, id and prompt tokens."""
    turns = (("user", filler + " say it"), ("assistant", word), ("user", "say it"))
    body: dict[str, Any] = {
        "model": "parrot",
        "messages": [{"role": role, "content": content} for role, content in turns],
        "temperature": 0,
        "max_tokens": 60,
    }
    if not stream:
        answer = daemon.chat(**body).json()
        text = answer["choices"][0]["message"]["content"]
        return text, answer["id"], answer["usage"]["prompt_tokens"]
    usage = {"include_usage": True}
    with daemon.stream(**body, stream_options=usage) as client:
        raw = read_until(client, b"[DONE]")
    *events, last = data_of(raw)
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events)
    return text, last["id"], last["usage"]["prompt_tokens"]


@pytest.mark.case("05")
@pytest.mark.parametrize("number", range(5))
def test_no_answer_holds_anything_of_another(daemon: RunningDaemon, number: int) -> None:
    chance = random.Random(number)
    words = [f"W{at:02d}-{chance.randrange(10**9):09d}" for at in range(AT_ONCE)]
    fillers = [
        "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randrange(10, 300)))
        for _ in words
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [
            pool.submit(say, daemon, word, filler, stream=at % 2 == 0)
            for at, (word, filler) in enumerate(zip(words, fillers, strict=True))
        ]
        answers = [one.result() for one in asked]
    assert [text for text, _, _ in answers] == words
    assert len({id for _, id, _ in answers}) == AT_ONCE
    # Alone it counts as many prompt tokens.
    at = chance.randrange(AT_ONCE)
    assert say(daemon, words[at], fillers[at], stream=False)[2] == answers[at][2]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def leave(client: socket.socket, by_reset: bool) -> None:
    if by_reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def short_chat_s(daemon: RunningDaemon) -> float:
    """Seconds of a short chat; the best of five, since other work of a test run may hold one up."""
    took: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        assert daemon.chat("slow", max_tokens=4).status == 200
        took.append(time.monotonic() - began)
    return min(took)


@pytest.mark.alone
@pytest.mark.case("09")
@pytest.mark.parametrize("by_reset", [False, True], ids=["FIN", "RST"])
def test_an_engine_whose_client_has_left_is_idle_within_a_second(
    daemon: RunningDaemon, by_reset: bool
) -> None:
    before = model(daemon, "slow")
    engine = psutil.Process(before["pid"])
    at_first_s = short_chat_s(daemon)
    said = len(daemon.stderr)
    client = daemon.stream(model="slow", max_tokens=20000)
    for _ in range(10):
        read_until(client, b"data: {")
    leave(client, by_reset)
    left_at = time.monotonic()

    def is_idle() -> bool:
        began, used = time.monotonic(), cpu_s(engine)
        time.sleep(0.1)  # over which the use is measured
        return cpu_s(engine) - used < IDLE_SHARE * (time.monotonic() - began)

    wait_for(is_idle, 5, "the engine is idle")
    assert time.monotonic() - left_at <= 1.0
    assert short_chat_s(daemon) <= 2 * at_first_s
    assert model(daemon, "slow")["pid"] == before["pid"]
    assert "Traceback" not in daemon.stderr[said:]


@pytest.mark.case("09")
@pytest.mark.parametrize("by_reset", [False, True], ids=["FIN", "RST"])
def test_a_stream_beside_one_that_is_left_is_what_it_is_alone(
    daemon: RunningDaemon, by_reset: bool
) -> None:
    asked: dict[str, Any] = {"model": "slow", "max_tokens": 60, "temperature": 0}
    alone = daemon.chat(**asked).json()["choices"][0]["message"]["content"]
    leaving = daemon.stream(model="slow", max_tokens=20000)
    read_until(leaving, b"data: {")
    staying = daemon.stream(**asked)
    first = read_until(staying, b"data: {")
    leave(leaving, by_reset)
    rest = read_until(staying, b"[DONE]")
    assert streamed_text(first + rest) == alone
