"""Clients that stop reading, through the whole daemon and a real engine at its defaults."""

import json
import selectors
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.material.models import ModelSpec, build_model
from tests.running_daemon import REAL, RunningDaemon, read_all
from tests.waiting import wait_for

STALLED = 20
MIB = 1 << 20
# Long streams of large events (logprobs), so that buffers fill within few tokens.
MODEL = ModelSpec(kind="full", context=16384)
STALL_TIMEOUT_S = 60.0


def open_stream(daemon: RunningDaemon, max_tokens: int, receive_bytes: int) -> socket.socket:
    """A stream that nobody has read from."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(60)
    client.connect(("127.0.0.1", daemon.port))
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "go on"}],
            "stream": True,
            "max_tokens": max_tokens,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).encode()
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    return client


def read_to_the_end(clients: list[socket.socket]) -> None:
    """Read all streams at once until each has ended."""
    with selectors.DefaultSelector() as selector:
        tails = {client: b"" for client in clients}
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(60):
                client = next(c for c in clients if c is key.fileobj)
                tails[client] = (tails[client] + client.recv(1 << 16))[-16:]
                if tails[client].endswith(b"0\r\n\r\n"):
                    selector.unregister(client)
                    client.close()


def progress(daemon: RunningDaemon) -> Any:
    """The engine's last figures, the first of which come a moment after it is ready."""
    return wait_for(lambda: daemon.status()["models"][0]["progress"], 5, "it reports")


def test_a_reader_that_was_given_up_frees_its_place_and_finds_that_it_stopped_reading(
    tmp_path: Path,
) -> None:
    folder = build_model(tmp_path / "m", MODEL)
    # Less than the default only so that the test is short.
    flags = ("--stall-timeout", "1")
    with RunningDaemon(tmp_path / "home", str(folder), *flags, program=REAL) as daemon:
        pid = daemon.wait_state("ready", 0, 120)["pid"]
        with open_stream(daemon, 15_000, 4096) as client:
            wait_for(lambda: progress(daemon)["stalled"] == 1, 60, "the engine gave it up")
            wait_for(lambda: daemon.status()["models"][0]["active"] == 0, 5, "its place is free")
            wait_for(lambda: daemon.get("/v1/requests")["requests"] == [], 5, "it has its outcome")
            text = read_all(client)
        assert b'"code":"client_stalled"' in text[-400:]
        assert b"engine_died" not in text and b"[DONE]" not in text
        assert daemon.status()["models"][0]["pid"] == pid


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_stalled_readers_cost_little_and_are_cancelled_and_counted(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "m", MODEL)
    with RunningDaemon(tmp_path / "home", str(folder), program=REAL) as daemon:
        engine = psutil.Process(daemon.wait_state("ready", 0, 120)["pid"])
        supervisor = psutil.Process(daemon.process.pid)
        # What as many streams cost whose clients read; the rest is the price of a stall.
        read_to_the_end([open_stream(daemon, 600, 1 << 20) for _ in range(STALLED)])
        before = [process.memory_info().rss for process in (supervisor, engine)]
        clients = [open_stream(daemon, 15_000, 4096) for _ in range(STALLED)]
        began = time.monotonic()
        with open_stream(daemon, 200, 1 << 20) as reader:
            gaps: list[float] = []
            last, text = time.monotonic(), b""
            while not text.endswith(b"0\r\n\r\n"):
                text = text[-16:] + reader.recv(65536)
                gaps.append(time.monotonic() - last)
                last += gaps[-1]
        assert max(gaps[1:]) < 2.0

        seen = [0, 0.0]

        def is_waiting() -> bool:
            tokens = progress(daemon)["generated_tokens"]
            if tokens != seen[0]:
                seen[:] = [tokens, time.monotonic()]
            return time.monotonic() - seen[1] > 1.0

        wait_for(is_waiting, 120, "no token for a second: every stream waits for its client")
        after = [process.memory_info().rss for process in (supervisor, engine)]
        for name, a, b in zip(("supervisor", "engine"), before, after, strict=True):
            assert (b - a) / STALLED < 2 * MIB, name
        wait_for(lambda: progress(daemon)["stalled"] == STALLED, STALL_TIMEOUT_S + 60, "counted")
        assert time.monotonic() - began >= STALL_TIMEOUT_S
        assert progress(daemon)["active"] == 0
        assert daemon.chat(max_tokens=5).status == 200
        for client in clients:
            client.close()
