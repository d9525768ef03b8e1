"""The client's side of a relay under test: requests as bytes, answers as they came."""

import asyncio
import socket
import struct
from typing import cast

from tests.integration.relay.engine_side import END


def post(body: bytes, path: str = "/v1/chat/completions", headers: bytes = b"") -> bytes:
    """A POST request with a Content-Length."""
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%b\r\n%b"
    ) % (path.encode(), len(body), headers, body)


class Answer:
    """One answer as a client read it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.head = head
        self.body = body
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = [
            (name.lower(), value.strip())
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        ]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def one(self, name: str) -> str:
        (value,) = self.all(name)
        return value


class Client:
    """A client's end of one TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(
        self, body: bytes, path: str = "/v1/chat/completions", headers: bytes = b""
    ) -> None:
        await self.send(post(body, path, headers))

    async def read_head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def read_chunk(self) -> bytes:
        """One chunk's payload; b"" is the terminator."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def read_answer(self) -> Answer:
        """A whole answer, by its own framing."""
        head = await self.read_head()
        answer = Answer(head, b"")
        if answer.all("transfer-encoding"):
            parts: list[bytes] = []
            while part := await self.read_chunk():
                parts.append(part)
            answer.body = b"".join(parts)
        elif answer.all("content-length"):
            answer.body = await self.reader.readexactly(int(answer.one("content-length")))
        return answer

    async def read_end(self) -> bytes:
        """What still came of a chunked body, its terminator included."""
        return await self.reader.readuntil(END)

    async def wait_closed(self) -> bytes:
        """What still came until the relay closed the connection."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    def pause(self) -> None:
        """Stop reading."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def resume(self) -> None:
        """Read again."""
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    def leave(self) -> None:
        """Close in form (FIN)."""
        self.writer.close()

    def reset(self) -> None:
        """Close by RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
