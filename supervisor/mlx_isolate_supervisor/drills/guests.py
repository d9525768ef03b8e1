"""Drills in which clients misbehave: one leaves, one stops reading."""

import asyncio
import socket
import time
from urllib.parse import urlsplit

import msgspec

from mlx_isolate_supervisor.drills.record import Broken
from mlx_isolate_supervisor.drills.scene import LOAD_DEADLINE_S, MOMENT_S, Scene, patience_s
from mlx_isolate_supervisor.drills.traffic import ENDLESS
from mlx_isolate_supervisor.telemetry.status import ModelStatus

STREAMS = 4
# The stalled client asks for so many tokens and reads nothing for so long.
STALL_TOKENS = 400
STALL_S = 4.0
RECEIVE_BYTES = 4096
MB = 1_000_000


async def client_gone(scene: Scene) -> None:
    """Clients leave in mid-stream: the engine stops working for them."""
    before = await scene.model()
    begun = [scene.client.begin(scene.model_id, ENDLESS) for _ in range(STREAMS)]
    waiting = [seen.begun.wait() for seen, _ in begun]
    begin_s = patience_s(before.load_s or 0.0)
    await scene.wait("served", "the streams begin", asyncio.gather(*waiting), begin_s)
    others = (await scene.model()).active - STREAMS
    scene.act(f"{STREAMS} clients leave in mid-stream")
    await scene.client.leave(*(task for _, task in begun))

    def is_idle(model: ModelStatus) -> bool:
        working = model.progress.active if model.progress else 0
        return model.active <= max(0, others) and working <= max(0, others)

    after = await scene.until("cancel", "the engine has stopped", is_idle)
    scene.record.within("cancel", scene.since())
    scene.mark(f"engine #{after.incarnation} (pid {after.pid}) works for none of them")
    scene.judge_complete("served", await scene.answer("an answer"))
    scene.record.facts |= {"old_pid": before.pid, "new_pid": after.pid}
    scene.judge_same(before, after)


async def stalled_client(scene: Scene) -> None:
    """A client stops reading: others are served, memory stays, and it can go on later."""
    before = await scene.model()
    memory = (await scene.status()).supervisor.memory_bytes
    stalled = await asyncio.to_thread(_open, scene)
    try:
        scene.act("a client asks for a stream and does not read")
        asked = time.monotonic()
        neighbour = await scene.wait(
            "neighbour", "an answer for another", scene.client.answer(scene.model_id), MOMENT_S * 2
        )
        took = time.monotonic() - asked
        scene.mark(f"another client is answered: {neighbour!r}")
        scene.record.within("neighbour", took, "" if neighbour.is_complete else repr(neighbour))
        scene.judge_complete("served", neighbour)
        await asyncio.sleep(max(0.0, STALL_S - scene.since()))
        grown = (await scene.status()).supervisor.memory_bytes - memory
        scene.record.within("supervisor_growth", grown / MB)
        scene.mark("it reads again")
        rest = await scene.wait(
            "resumed", "the rest", asyncio.to_thread(_read_all, stalled), LOAD_DEADLINE_S
        )
    finally:
        stalled.close()
    whole = rest.endswith(b"0\r\n\r\n") and b"data: [DONE]" in rest
    scene.mark(f"it has read {len(rest)} bytes")
    scene.record.that("resumed", whole, "" if whole else repr(rest[-200:]))
    after = await scene.model()
    scene.record.facts |= {"old_pid": before.pid, "new_pid": after.pid}
    scene.judge_same(before, after)


def _open(scene: Scene) -> socket.socket:
    """A streaming request whose answer nobody reads, with a small window."""
    parts = urlsplit(scene.client.url)
    body = msgspec.json.encode(scene.client.body(scene.model_id, STALL_TOKENS))
    lines = [
        f"POST {parts.path}/v1/completions HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in scene.client.headers.items()),
    ]
    client = socket.socket()
    try:
        # Before the connection is made, or the window is no longer small.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        client.settimeout(LOAD_DEADLINE_S)
        client.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    except OSError as error:
        client.close()
        raise Broken("served", f"no connection: {error}") from error
    return client


def _read_all(client: socket.socket) -> bytes:
    parts: list[bytes] = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)
