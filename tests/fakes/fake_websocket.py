"""The fake engine's WebSocket: an echo that a client's text can tell to do worse, byte by byte.

Texts that are commands: `send COUNT SIZE` (binary messages), `close CODE REASON`, `die HOW`,
`half HOW` (half a message, then die), `drop` (end the connection without a close frame), `deaf`
(read nothing more). Everything else comes back as it is; pings are answered, closes too.
"""

import asyncio
import base64
import hashlib
import struct
from collections.abc import Callable

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def accept_of(key: str) -> str:
    """The answer to a client's Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()


def frame(opcode: int, payload: bytes) -> bytes:
    """One whole unmasked message."""
    size = len(payload)
    if size < 126:
        return bytes((0x80 | opcode, size)) + payload
    if size < 1 << 16:
        return bytes((0x80 | opcode, 126)) + struct.pack(">H", size) + payload
    return bytes((0x80 | opcode, 127)) + struct.pack(">Q", size) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Opcode and payload of the next frame."""
    first, second = await reader.readexactly(2)
    size = second & 0x7F
    if size == 126:
        (size,) = struct.unpack(">H", await reader.readexactly(2))
    elif size == 127:
        (size,) = struct.unpack(">Q", await reader.readexactly(8))
    mask = await reader.readexactly(4) if second & 0x80 else b""
    payload = await reader.readexactly(size)
    if mask:
        whole = (mask * (size // 4 + 1))[:size]
        payload = (int.from_bytes(payload, "big") ^ int.from_bytes(whole, "big")).to_bytes(
            size, "big"
        )
    return first & 0x0F, payload


class FakeWebSocket:
    """One upgraded connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        die: Callable[[str], object],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._die = die

    async def serve(self, key: str, protocol: str | None) -> None:
        """Shake hands, then answer until one side ends."""
        head = (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept_of(key)}\r\nX-Fake: yes\r\n"
        )
        if protocol is not None:
            head += f"Sec-WebSocket-Protocol: {protocol}\r\n"
        self._writer.write(head.encode() + b"\r\n")
        while True:
            opcode, payload = await read_frame(self._reader)
            if opcode == CLOSE:
                await self._send(frame(CLOSE, payload))
                return
            if opcode == PING:
                await self._send(frame(PONG, payload))
            elif opcode == TEXT and not await self._obey(payload.decode()) or opcode == BINARY:
                await self._send(frame(opcode, payload))

    async def _obey(self, text: str) -> bool:
        word, *rest = text.split(" ")
        match word, rest:
            case "send", [count, size]:
                message = frame(BINARY, b"x" * int(size))
                for _ in range(int(count)):
                    await self._send(message)
            case "close", [code, *reason]:
                await self._send(
                    frame(CLOSE, struct.pack(">H", int(code)) + " ".join(reason).encode())
                )
                raise ConnectionError
            case "die", [how]:
                self._die(how)
            case "half", [how]:
                await self._send(frame(BINARY, b"x" * 1000)[:500])
                self._die(how)
            case "drop", []:
                raise ConnectionError
            case "deaf", []:
                await asyncio.Event().wait()
            case _:
                return False
        return True

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()
