"""An HTTP client on a unix socket that shows what was really sent: status, headers, each chunk."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class RawResponse:
    """One response, read to its end."""

    status: int
    headers: dict[str, str]
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = True

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> list[Any]:
        """The JSON of each `data:` event before [DONE]."""
        return [
            json.loads(line[6:])
            for line in self.body.decode().split("\n")
            if line.startswith("data: ") and line != "data: [DONE]"
        ]


class RawClient:
    """One connection; `send` a request, then `head` and `chunk` by chunk, or `answer` at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @staticmethod
    async def connect(socket_path: str) -> "RawClient":
        return RawClient(*await asyncio.open_unix_connection(socket_path))

    def send(
        self,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> None:
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        lines = [f"{method} {path} HTTP/1.1", "Host: engine", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def head(self) -> RawResponse:
        block = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = block.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return RawResponse(int(first.split()[1]), headers)

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> RawResponse:
        response = await self.head()
        if "content-length" in response.headers:
            size = int(response.headers["content-length"])
            response.chunks.append(await self.reader.readexactly(size))
            return response
        try:
            while chunk := await self.chunk():
                response.chunks.append(chunk)
        except asyncio.IncompleteReadError:
            response.ended = False
        return response

    def close(self) -> None:
        self.writer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def ask(
    socket_path: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> RawResponse:
    """One request on a connection of its own."""
    async with await RawClient.connect(socket_path) as client:
        client.send(path, body, method=method, headers=headers)
        return await client.answer()
