"""The engine's side of a relay under test: its listener, its connections, its bytes."""

import asyncio
from typing import cast

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    """One chunk as an engine frames it."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    """One SSE event in one chunk."""
    return chunk(f"data: {text}\n\n".encode())


def whole(body: bytes, head: bytes = JSON_HEAD) -> bytes:
    """An answer with a Content-Length."""
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


class EngineSide:
    """The engine's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.flooded_bytes = 0

    @property
    def is_blocked(self) -> bool:
        """Whether the relay has stopped reading what was sent."""
        return self.writer.transport.get_write_buffer_size() > 0

    async def read_head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def read_request(self) -> tuple[bytes, bytes]:
        """The head (with its blank line) and the body of the next request."""
        head = await self.read_head()
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return head, await self._reader.readexactly(length)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_exactly(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def read_rest(self) -> bytes:
        """Everything up to the end of what the relay sends."""
        return await self._reader.read()

    async def flood(self, payload: bytes = b"data: " + b"x" * 1000 + b"\n\n") -> None:
        """Send events until the relay closes the connection."""
        await self.flood_with(chunk(payload))

    async def flood_with(self, block: bytes) -> None:
        """Send the same bytes until the relay closes the connection."""
        try:
            while not self._reader.at_eof():
                self.writer.write(block)
                await self.writer.drain()
                self.flooded_bytes += len(block)
                if self.flooded_bytes % (50 * len(block)) == 0:
                    await asyncio.sleep(0)
        except ConnectionError:
            pass

    async def wait_closed_by_relay(self) -> None:
        """Wait for the relay to close the connection; anything else it sends is a fault."""
        try:
            rest = await self._reader.read()
        except ConnectionResetError:
            rest = b""
        assert rest == b"", f"the relay sent more: {rest[:200]!r}"

    def pause(self) -> None:
        """Stop reading."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def resume(self) -> None:
        """Read again."""
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Die as a killed process does: at once, with what it had not read dropped."""
        self.writer.transport.abort()


class ScriptedEngine:
    """Listens on a unix socket; the test takes each connection as it comes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._arrived: asyncio.Queue[EngineSide] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self.connections = 0
        self._sides: list[EngineSide] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self.path, limit=80 << 20)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        side = EngineSide(reader, writer)
        self._sides.append(side)
        self._arrived.put_nowait(side)

    async def accept(self) -> EngineSide:
        return await self._arrived.get()

    async def kill(self) -> None:
        """End as SIGKILL ends an engine: every connection, and the listener; the file stays."""
        if self._server is not None:
            self._server.close()
        for side in self._sides:
            side.reset()
