"""A made-up engine for the relay's bench: SSE events at a fixed rate, as cheap as Python allows.

Spawned by the daemon of `relay_daemon.py`, as an engine is. All streams emit in the same steps, as the rows of a
batch do. The request body is JSON with `events`, `interval_s` and `event_bytes`; without `events`
the answer is a small JSON object.
"""

import argparse
import asyncio
import os
from typing import Any, cast

import msgspec
import uvloop

from mlx_isolate_shared import wire
from mlx_isolate_shared.config import PROGRESS_INTERVAL_S

_ANSWER = b'{"id":"x","object":"chat.completion","choices":[],"usage":{"total_tokens":9}}'
WHOLE = (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b") % (
    len(_ANSWER),
    _ANSWER,
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def event_of(size: int) -> bytes:
    """One event of about `size` bytes, in one chunk."""
    payload = b'data: {"choices":[{"delta":{"content":"' + b"x" * max(1, size - 50) + b'"}}]}\n\n'
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Source(asyncio.Protocol):
    """One connection; a request may follow the last one's answer."""

    def __init__(self, steps: "Steps") -> None:
        self._steps = steps
        self._buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self.transport = None

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._buffer += data
        head, blank, body = self._buffer.partition(b"\r\n\r\n")
        if not blank or self.transport is None:
            return
        _, _, rest = head.lower().partition(b"content-length:")
        if len(body) < int(rest.split(b"\r\n")[0]):
            return
        self._buffer = b""
        asked: dict[str, Any] = msgspec.json.decode(body)
        if "events" not in asked:
            self.transport.write(WHOLE)
            return
        self.transport.write(STREAM_HEAD + event_of(asked["event_bytes"]))
        self._steps.add(self, asked["events"] - 1, asked["interval_s"], asked["event_bytes"])


class Steps:
    """Emits one event to every running stream at each step."""

    def __init__(self) -> None:
        self._left: dict[Source, int] = {}
        self._event = b""
        self._interval_s = 0.0
        self._next = 0.0

    def add(self, source: Source, events: int, interval_s: float, event_bytes: int) -> None:
        """Run a stream from the next step on."""
        loop = asyncio.get_running_loop()
        self._event, self._interval_s = event_of(event_bytes), interval_s
        if not self._left:
            self._next = loop.time() + interval_s
            loop.call_at(self._next, self._step)
        self._left[source] = events

    def _step(self) -> None:
        for source, left in list(self._left.items()):
            if source.transport is None or left <= 0:
                del self._left[source]
                if source.transport is not None:
                    source.transport.write(LAST)
                continue
            source.transport.write(self._event)
            self._left[source] = left - 1
        if self._left:
            self._next += self._interval_s
            asyncio.get_running_loop().call_at(self._next, self._step)


async def report(fd: int, path: str) -> None:
    """Say that the socket listens, then that nothing is wrong, for ever."""
    facts = wire.ModelFacts(
        architecture="source",
        parameters=0,
        weights_bytes=0,
        dtype="none",
        context_length=1,
        vocab_size=1,
        backend="none",
    )
    ready = wire.Ready(pid=os.getpid(), socket_path=path, load_s=0.0, facts=facts)
    os.write(fd, wire.encode_line(ready))
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        os.write(fd, wire.encode_line(wire.Progress()))


async def serve(path: str, report_fd: int) -> None:
    """Listen until the supervisor ends this process."""
    steps = Steps()
    server = await asyncio.get_running_loop().create_unix_server(lambda: Source(steps), path)
    async with server, asyncio.TaskGroup() as tasks:
        tasks.create_task(report(report_fd, path))
        await server.serve_forever()


def main() -> None:
    """Speak the spawn contract as far as a bench needs it."""
    parser = argparse.ArgumentParser()
    for name in ("--id", "--incarnation"):
        parser.add_argument(name, required=True, help="of the spawn contract")
    for name in ("--spec-fd", "--report-fd", "--lifeline-fd"):
        parser.add_argument(name, type=int, required=True, help="of the spawn contract")
    parser.add_argument("--nice", type=int, default=0, help="of the spawn contract")
    given = parser.parse_args()
    os.nice(given.nice)
    with os.fdopen(given.spec_fd, "rb") as lines:
        for line in lines:
            spec = wire.decode_spec(line)
            if isinstance(spec, wire.Start):
                uvloop.run(serve(spec.socket_path, given.report_fd))


if __name__ == "__main__":
    main()
