"""An HTTP/1.1 client for soaks that shows what came: the head, each piece of the body, the end."""

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any, Self

READ_BYTES = 65536
LINE_BYTES_MAX = 1 << 20


class Broken(Exception):
    """The connection ended in the midst of an answer, or what came is no HTTP."""


class Exchange:
    """One request on a connection of its own. `send`, then `head`, then `pieces`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._left: int | None = None
        self.headers: dict[str, str] = {}

    @classmethod
    async def connect(cls, port: int, receive_bytes: int | None = None) -> Self:
        """Connect to the daemon on this machine.

        Args:
            port: of the daemon.
            receive_bytes: a small receive buffer, so that not reading is felt soon.
        """
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.setblocking(False)
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        limit = receive_bytes or LINE_BYTES_MAX
        return cls(*await asyncio.open_connection(sock=client, limit=limit))

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Write a whole request."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.send_raw(head.encode() + body)

    def send_raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._writer.write(data)

    def end_sending(self) -> None:
        """Close our half of the connection."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def head(self) -> int:
        """The status; the headers are kept.

        Raises:
            Broken: none came.
        """
        try:
            block = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = block.decode("latin-1").strip().split("\r\n")
            self.headers = {
                name.lower(): value for name, value in (line.split(": ", 1) for line in lines)
            }
            if "content-length" in self.headers:
                self._left = int(self.headers["content-length"])
            return int(first.split()[1])
        except (asyncio.IncompleteReadError, ValueError, IndexError, OSError) as error:
            raise Broken(f"no head: {error!r}") from error

    async def piece(self) -> bytes:
        """The next chunk, or part, of the body; empty at its proper end.

        Raises:
            Broken: the connection ended before that.
        """
        try:
            if self._left is None:
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                return (await self._reader.readexactly(size + 2))[:-2]
            part = await self._reader.read(min(self._left, READ_BYTES))
            if not part and self._left:
                raise Broken(f"{self._left} bytes are missing")
            self._left -= len(part)
            return part
        except (asyncio.IncompleteReadError, ValueError, OSError) as error:
            raise Broken(f"cut off: {error!r}") from error

    async def body(self) -> bytes:
        """All of the rest of the body."""
        parts: list[bytes] = []
        while part := await self.piece():
            parts.append(part)
        return b"".join(parts)

    def close(self, resets: bool = False) -> None:
        """Leave, by FIN or by RST."""
        if resets:
            with contextlib.suppress(OSError):
                self._writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        self._writer.close()


async def get_json(port: int, path: str) -> Any:
    """The JSON of a GET.

    Raises:
        Broken: there is none.
    """
    exchange = await Exchange.connect(port)
    try:
        exchange.send("GET", path)
        if await exchange.head() != 200:
            raise Broken(path)
        return json.loads(await exchange.body())
    finally:
        exchange.close()
