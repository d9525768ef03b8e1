"""The fake engine's HTTP side: raw HTTP/1.1 on asyncio streams, so that every byte is chosen."""

import asyncio
import base64
import json
import os
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec

from mlx_isolate_shared import wire
from tests.fakes.fake_faults import RequestFaults
from tests.fakes.fake_websocket import FakeWebSocket


class Counters:
    """What the progress lines tell."""

    def __init__(self, mlx_bytes: int = 0, device_free_bytes: int = 0) -> None:
        self._mlx_bytes = mlx_bytes
        self._device_free_bytes = device_free_bytes
        self.prompt = self.generated = self.active = 0
        self.completed = self.cancelled = self.failed = 0
        self.active_sockets = 0

    def line(self) -> wire.Progress:
        return wire.Progress(
            prompt_tokens=self.prompt,
            generated_tokens=self.generated,
            active=self.active,
            completed=self.completed,
            cancelled=self.cancelled,
            failed=self.failed,
            footprint_bytes=10_000_000,
            mlx_active_bytes=self._mlx_bytes,
            device_free_bytes=self._device_free_bytes,
        )


class Request(msgspec.Struct, frozen=True):
    """One parsed request; header names in lower case, in order."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass
    return b"".join(parts)


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection, or None at its end."""
    head = await reader.readline()
    if not head:
        return None
    method, target, _ = head.decode("latin-1").split()
    headers: list[tuple[str, str]] = []
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers.append((name.strip().lower(), value.strip()))
    found = dict(headers)
    if "chunked" in found.get("transfer-encoding", ""):
        body = await read_chunked(reader)
    else:
        body = await reader.readexactly(int(found.get("content-length", "0")))
    return Request(method, target, tuple(headers), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def head(status: int, headers: list[tuple[str, str]]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} Fake\r\n{lines}\r\n".encode("latin-1")


def plain(status: int, value: object, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
    body = json.dumps(value).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *extra]
    return head(status, headers) + body


def asked_faults(body: bytes) -> RequestFaults:
    """What a request body asks for; nothing where it asks for nothing or is no object."""
    try:
        value = json.loads(body)
    except ValueError:
        return RequestFaults()
    return msgspec.convert(value.get("fake", {}) if isinstance(value, dict) else {}, RequestFaults)


class Close(Exception):
    """Close the connection without ending the answer."""


class Service:
    """Answers of one fake engine."""

    def __init__(self, start: wire.Start, counters: Counters, die: Callable[[str], object]) -> None:
        self._start = start
        self._counters = counters
        self._die = die

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; a client that leaves cancels its request."""
        try:
            while (request := await read_request(reader)) is not None:
                if request.header("upgrade") == "websocket" and "/ws" in request.target:
                    await self._upgrade(request, reader, writer)
                    break
                if asked_faults(request.body).hang_up is not None:
                    # Nothing that comes behind this request may be read.
                    cast(asyncio.Transport, writer.transport).pause_reading()
                answer = asyncio.ensure_future(self._answer(request, writer))
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    answer.cancel()
                    break
                answer.result()
                if gone.done():
                    break
                gone.cancel()
                # The reader stays taken until the cancelled task has run.
                await asyncio.wait({gone})
                if request.header("connection") == "close" or await self._hangs_up(request, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, Close):
            pass
        finally:
            writer.close()

    async def _hangs_up(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is to be closed now, as its own idle timeout would."""
        hang_up = asked_faults(request.body).hang_up
        if hang_up == "next":
            waiting = os.dup(writer.get_extra_info("socket").fileno())
            loop, came = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(waiting, came.set)
            try:
                await came.wait()
            finally:
                loop.remove_reader(waiting)
                os.close(waiting)
        return hang_up is not None

    async def _upgrade(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        key = request.header("sec-websocket-key") or ""
        self._counters.active_sockets += 1
        try:
            socket = FakeWebSocket(reader, writer, self._die)
            await socket.serve(key, request.header("sec-websocket-protocol"))
        finally:
            self._counters.active_sockets -= 1

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        path = request.target.partition("?")[0]
        if request.method == "GET" and path.endswith("/models"):
            listing = {"object": "list", "data": [{"id": self._start.model_id, "object": "model"}]}
            writer.write(plain(200, listing))
        elif request.method == "GET" and path == "/sockets":
            writer.write(plain(200, {"sockets": self._counters.active_sockets}))
        elif request.method == "GET":
            writer.write(plain(200, {"status": "ok", "pid": os.getpid(), "path": request.target}))
        elif request.method == "HEAD":
            writer.write(head(200, [("Content-Length", "123"), ("X-Fake", "yes")]))
        elif request.method != "POST" or path == "/admin/cache/flush":
            self._echo(request, RequestFaults(), writer)
        else:
            await self._complete(request, path, writer)
        await writer.drain()

    async def _complete(self, request: Request, path: str, writer: asyncio.StreamWriter) -> None:
        try:
            body: dict[str, Any] = json.loads(request.body or b"{}")
        except ValueError:
            writer.write(plain(400, {"error": {"message": "not JSON", "type": "x"}}))
            return
        faults = msgspec.convert(body.get("fake", {}), RequestFaults)
        if faults.echo:
            self._echo(request, faults, writer)
            return
        if faults.status is not None:
            error = {"message": "told to", "type": "fake", "param": None, "code": "fake"}
            writer.write(plain(faults.status, {"error": error}, faults.raw_headers))
            return
        self._counters.active += 1
        try:
            await Completion(self, body, faults, writer, chat="chat" in path).run()
            self._counters.completed += 1
        except asyncio.CancelledError:
            self._counters.cancelled += 1
            raise
        finally:
            self._counters.active -= 1

    def _echo(self, request: Request, faults: RequestFaults, writer: asyncio.StreamWriter) -> None:
        value = {
            "method": request.method,
            "target": request.target,
            "headers": request.headers,
            "body": base64.b64encode(request.body).decode(),
        }
        if faults.content_length:
            writer.write(plain(200, value, faults.raw_headers))
            return
        headers = [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        writer.write(head(200, [*headers, *faults.raw_headers]))
        writer.write(chunk(json.dumps(value).encode()) + b"0\r\n\r\n")

    def count(self, *, prompt: int = 0, generated: int = 0) -> None:
        self._counters.prompt += prompt
        self._counters.generated += generated

    def die(self, how: str) -> None:
        self._die(how)

    def describe(self) -> dict[str, Any]:
        return {
            "id": "chatcmpl-fake",
            "created": int(time.time()),
            "model": self._start.model_id,
            "system_fingerprint": f"pid-{os.getpid()}-incarnation-{self._start.incarnation}",
        }


class Completion:
    """One made-up completion: a stream of events, or one JSON answer."""

    def __init__(
        self,
        service: Service,
        body: dict[str, Any],
        faults: RequestFaults,
        writer: asyncio.StreamWriter,
        *,
        chat: bool,
    ) -> None:
        self._service = service
        self._faults = faults
        self._writer = writer
        self._chat = chat
        self._is_stream = bool(body.get("stream"))
        self._count = faults.chunks or int(body.get("max_tokens") or 5)
        self._headers_sent = False
        self._word = ("word" * (faults.chunk_bytes // 4 + 1))[: faults.chunk_bytes]

    async def run(self) -> None:
        """Prefill, then the answer, with the faults at their places."""
        if self._faults.keepalive_s and self._is_stream:
            self._send_headers()
        await self._prefill()
        if self._faults.after is None:
            await self._fault()
        if self._is_stream:
            await self._stream()
        else:
            await self._plain()

    async def _prefill(self) -> None:
        end = time.monotonic() + self._faults.prefill_s
        comment_at = time.monotonic() + self._faults.keepalive_s
        while (now := time.monotonic()) < end:
            await asyncio.sleep(min(0.02, end - now))
            if not self._faults.prefill_still:
                self._service.count(prompt=1)
            if self._headers_sent and time.monotonic() >= comment_at:
                comment_at += self._faults.keepalive_s
                self._writer.write(chunk(b": keepalive 1/2\n\n"))
        self._service.count(prompt=5)

    async def _fault(self) -> None:
        faults = self._faults
        if faults.partial:
            self._writer.write(self._event(self._delta(self._word))[: faults.chunk_bytes // 2 + 8])
            await self._writer.drain()
        if faults.die is not None:
            await self._writer.drain()
            self._service.die(faults.die)
        if faults.freeze:
            while True:
                time.sleep(1)  # noqa: ASYNC251  (the point: the whole process stands still)
        if faults.hang:
            await asyncio.Event().wait()
        if faults.error_event:
            error = {"message": "failed inside", "type": "server_error", "param": None, "code": "x"}
            self._writer.write(self._event({"error": error}))
            raise Close
        if faults.close:
            await self._writer.drain()
            raise Close

    def _send_headers(self) -> None:
        headers = [
            ("Content-Type", "text/event-stream"),
            ("Cache-Control", "no-cache"),
            ("Transfer-Encoding", "chunked"),
            *self._faults.raw_headers,
        ]
        self._writer.write(head(200, headers))
        self._headers_sent = True

    def _event(self, value: object) -> bytes:
        return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _delta(self, text: str, finish: str | None = None) -> dict[str, Any]:
        if self._chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text} if text else {}}
        else:
            choice = {"index": 0, "text": text}
        choice["finish_reason"] = finish
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._service.describe(), "object": kind, "choices": [choice]}

    async def _stream(self) -> None:
        if not self._headers_sent:
            self._send_headers()
        for number in range(self._count):
            if number == self._faults.after:
                await self._fault()
            if self._faults.interval_s:
                await asyncio.sleep(self._faults.interval_s)
            self._writer.write(self._event(self._delta(self._word)))
            self._service.count(generated=1)
            await self._writer.drain()
        if self._faults.after == self._count:
            await self._fault()
        self._writer.write(self._event(self._delta("", "length")))
        self._writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await self._writer.drain()

    async def _plain(self) -> None:
        for number in range(self._count):
            if number == self._faults.after:
                await self._fault()
            if self._faults.interval_s:
                await asyncio.sleep(self._faults.interval_s)
            self._service.count(generated=1)
        text = self._word * self._count
        if self._chat:
            choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}}
        else:
            choice = {"index": 0, "text": text}
        choice["finish_reason"] = "length"
        kind = "chat.completion" if self._chat else "text_completion"
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": self._count,
            "total_tokens": 5 + self._count,
        }
        answer = {**self._service.describe(), "object": kind, "choices": [choice], "usage": usage}
        self._writer.write(plain(200, answer, self._faults.raw_headers))
