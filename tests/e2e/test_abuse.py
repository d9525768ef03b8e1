"""Rude clients of the whole daemon: huge prompts and hundreds of aborts leave everybody else well."""

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

HUGE = "word " * 1_000_000
PAGE_P99_S = 0.100
ABORTS = 300
PLACES = 32
# What serving many at once adds to a process for good: threads, code that has run, and pages of
# which a little is used.
ENGINE_BYTES = 40 << 20
# Small arrays in buffers that are larger; the KV of one request would be four times as much.
MLX_BYTES = 1 << 20
REST_DEADLINE_S = 10.0


def model(daemon: RunningDaemon, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in daemon.status()["models"] if m["id"] == name)
    return found


@pytest.mark.case("21")
@pytest.mark.alone
def test_pages_and_other_models_are_well_beside_huge_prompts(daemon: RunningDaemon) -> None:
    """Four prompts of 5 MB at once; pages stay quick and another model answers."""
    pid = model(daemon, "slow")["pid"]
    took: list[float] = []
    with ThreadPoolExecutor(4) as pool:
        message = {"role": "user", "content": HUGE}
        huge = [pool.submit(daemon.chat, "slow", messages=[message]) for _ in range(4)]
        while not all(one.done() for one in huge):
            for page in ("/health", "/v1/models"):
                began = time.monotonic()
                daemon.get(page)
                took.append(time.monotonic() - began)
            assert daemon.chat("full", max_tokens=2).status == 200
    assert len(took) >= 4
    assert sorted(took)[int(0.99 * len(took)) - 1] <= PAGE_P99_S, sorted(took)[-5:]
    for one in huge:
        answer = one.result()
        assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert model(daemon, "slow")["pid"] == pid


def abort(daemon: RunningDaemon, number: int, seed: int) -> None:
    """Begin a stream and leave it, by FIN or RST: each fifth at once, the rest within 20 events."""
    chance = random.Random(seed + number)
    with daemon.stream(model="slow", max_tokens=4000) as client:
        if number % 5:
            for _ in range(chance.randrange(21)):
                read_until(client, b"data:")
        if chance.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def serve_all_places(daemon: RunningDaemon) -> float:
    """Seconds that as many requests at once as there are places take."""
    began = time.monotonic()
    with ThreadPoolExecutor(PLACES) as pool:
        answers = [pool.submit(daemon.chat, "slow", max_tokens=4) for _ in range(PLACES)]
        assert {answer.result().status for answer in answers} == {200}
    return time.monotonic() - began


def wait_at_rest(daemon: RunningDaemon) -> int:
    """Wait until the engine has given back what it can; MLX's bytes beside the prompt cache."""
    wait_for(
        lambda: model(daemon, "slow")["progress"]["mlx_cache_bytes"] == 0,
        REST_DEADLINE_S,
        "the engine has given its freed buffers back",
    )
    progress = model(daemon, "slow")["progress"]
    return int(progress["mlx_active_bytes"] - progress["cache"]["ram_bytes"])


@pytest.mark.case("11")
def test_three_hundred_aborts_leak_no_place(daemon: RunningDaemon) -> None:
    """Afterwards the counters are zero, descriptors and memory are back, and all places serve."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    processes = [psutil.Process(pid) for pid in (daemon.process.pid, model(daemon, "slow")["pid"])]
    before = [process.num_fds() for process in processes]
    mlx_before = wait_at_rest(daemon)
    engine_before = processes[1].memory_info().rss
    serve_all_places(daemon)
    at_first_s = serve_all_places(daemon)
    supervisor_before = processes[0].memory_info().rss
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(abort, [daemon] * ABORTS, range(ABORTS), [seed] * ABORTS))

    def is_quiet() -> bool:
        now = model(daemon, "slow")
        return (now["active"], now["queued"], now["progress"]["active"]) == (0, 0, 0)

    wait_for(is_quiet, 5, "no request is left")
    # Connections to the engine may be kept for reuse: eight at most.
    wait_for(lambda: all(p.num_fds() <= n + 10 for p, n in zip(processes, before, strict=True)), 5)
    # A leaked place would cost a multiple; the rest is the machine's noise.
    assert serve_all_places(daemon) <= 2.5 * at_first_s + 0.5
    assert processes[0].memory_info().rss <= 1.1 * supervisor_before
    mlx_after = wait_at_rest(daemon)
    assert mlx_after - mlx_before <= MLX_BYTES
    assert processes[1].memory_info().rss - engine_before <= ENGINE_BYTES
