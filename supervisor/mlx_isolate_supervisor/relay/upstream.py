"""One connection to an engine's socket: a request out, an answer's head and body in."""

import asyncio
import select
from typing import Protocol, cast

from mlx_isolate_supervisor.relay.framing import (
    AnswerHead,
    Body,
    ChunkedBody,
    FramingError,
    SizedBody,
    parse_head,
)
from mlx_isolate_supervisor.relay.limits import ANSWER_HEAD_BYTES_MAX

# Body bytes that may arrive before anybody takes them; then the engine is made to wait.
_EARLY_BYTES_MAX = 256 * 1024
# Below this a request's head and body leave in one write, which costs one copy.
_JOIN_BYTES_MAX = 64 * 1024


class EngineGone(Exception):
    """The connection ended before the answer did."""


class Sink(Protocol):
    """Where a body goes."""

    @property
    def writing_paused(self) -> bool:
        """Whether so much is waiting that the source should stop."""
        ...

    def write(self, block: bytes, /) -> None:
        """Take a block; must not block or raise."""
        ...

    async def drain(self) -> None:
        """Wait until writing is no longer paused; raises if that takes too long."""
        ...


class EngineConnection(asyncio.Protocol):
    """A connection that carries one request at a time; its owner is the only one who waits on it.

    Attributes:
        bytes_passed: body bytes of the current answer that were handed to the sink, framing
            included.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._broken: EngineGone | FramingError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._head_bytes = bytearray()
        self._head: AnswerHead | None = None
        self._body: Body | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._sink: Sink | None = None
        self._is_paused = False
        self._is_idle = True
        self.bytes_passed = 0

    def __repr__(self) -> str:
        """What it is doing."""
        if self._broken is not None:
            return f"<EngineConnection broken: {self._broken}>"
        state = "idle" if self._is_idle else "head" if self._head is None else "body"
        return f"<EngineConnection {state}{' paused' if self._is_paused else ''}>"

    # What the owner calls.

    def send(self, head: bytes, body: bytes) -> None:
        """Send one request. Afterwards it must never be sent again, whatever happens."""
        assert self._transport is not None and self._is_idle
        self._is_idle = False
        self._head_bytes.clear()
        self._head = None
        self._body = None
        self.bytes_passed = 0
        if len(body) <= _JOIN_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def wait_head(self) -> AnswerHead:
        """The final head of the answer; informational ones are skipped.

        Raises:
            EngineGone: the connection ended first.
            FramingError: these are no HTTP answers.
        """
        while self._head is None:
            await self._wait()
        return self._head

    async def read_whole(self) -> bytes:
        """The whole body of an answer; only for answers of a known, small length."""
        assert self._body is not None
        while not self._body.has_ended:
            self._resume()
            await self._wait()
        return b"".join(self._early)

    async def pass_body(self, sink: Sink) -> None:
        """Hand the body to `sink` until its end; the engine waits while the sink is full.

        Raises:
            EngineGone: the connection ended first; everything whole has been handed over.
            FramingError: the engine's framing is wrong; likewise.
        """
        assert self._body is not None
        early = b"".join(self._early)
        self._early.clear()
        self._sink = sink
        if early:
            self._pass(sink, early)
        while True:
            if self._is_paused:
                await sink.drain()
                self._resume()
            if self._body.has_ended:
                return
            if not self._is_paused:
                await self._wait()

    @property
    def events_passed(self) -> int:
        """Chunks of the current answer that were handed out."""
        return 0 if self._body is None else self._body.chunks

    @property
    def is_reusable(self) -> bool:
        """Whether the answer is over and the engine will take another request here."""
        return (
            self._broken is None
            and self._transport is not None
            and self._head is not None
            and self._head.keeps_alive
            and self._body is not None
            and self._body.has_ended
            and not self._body.surplus
            and not self._transport.get_write_buffer_size()
        )

    def rest(self) -> None:
        """Become idle after an answer; only when `is_reusable`."""
        assert self.is_reusable
        self._early.clear()
        self._early_bytes = 0
        self._sink = None
        self._is_idle = True
        self._resume()

    @property
    def is_connected(self) -> bool:
        """Whether the event loop has not yet seen the connection end."""
        return self._broken is None and self._transport is not None

    @property
    def is_open(self) -> bool:
        """Whether the engine's end is open and silent at this moment, asked of the kernel.

        What the event loop knows may be one turn old; a request written to a connection that the
        engine has closed is lost, and it must not be sent twice.
        """
        if self._broken is not None or self._transport is None or self._transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close at once, dropping what was not sent; the engine takes it as a cancellation."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop; the hot path of every stream."""
        sink = self._sink
        if sink is None:
            self._take_early(data)
            return
        body = self._body
        assert body is not None
        try:
            block = body.feed(data)
        except FramingError as error:
            self._fail(error)
            return
        if block:
            self._pass(sink, block)
        if body.has_ended:
            self._wake()

    def eof_received(self) -> None:
        """Called by the event loop."""
        self._break(EngineGone("the engine closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        self._break(EngineGone("the connection to the engine broke"))

    # The rest is private.

    def _pass(self, sink: Sink, block: bytes) -> None:
        sink.write(block)
        self.bytes_passed += len(block)
        if sink.writing_paused and not self._is_paused:
            self._pause()
            self._wake()

    def _take_early(self, data: bytes) -> None:
        try:
            if self._is_idle:
                raise FramingError("bytes that nobody asked for")
            if self._head is None:
                data = self._take_head(data)
            if self._body is not None and data:
                block = self._body.feed(data)
                self._early.append(block)
                self._early_bytes += len(block)
        except FramingError as error:
            self._fail(error)
            return
        if self._early_bytes > _EARLY_BYTES_MAX:
            self._pause()
        if self._head is not None:
            self._wake()

    def _take_head(self, data: bytes) -> bytes:
        """Collect the head; return what followed it."""
        buffer = self._head_bytes
        buffer += data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            if end > ANSWER_HEAD_BYTES_MAX:
                break
            head = parse_head(bytes(buffer[:end]))
            del buffer[: end + 4]
            if head.status == 101:
                raise FramingError("an upgrade that nobody asked for")
            if head.status < 200:
                continue
            self._head = head
            self._body = (
                ChunkedBody(whole_events=head.is_event_stream)
                if head.length is None
                else SizedBody(head.length)
            )
            rest = bytes(buffer)
            buffer.clear()
            return rest
        if len(buffer) > ANSWER_HEAD_BYTES_MAX:
            raise FramingError("a head that is too large")
        return b""

    async def _wait(self) -> None:
        """Wait for the next wake-up.

        Raises:
            EngineGone | FramingError: the connection is broken.
        """
        if self._broken is not None:
            raise self._broken
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: FramingError) -> None:
        """Nothing after a wrong byte can be trusted."""
        self._break(error)
        self.close()

    def _break(self, error: EngineGone | FramingError) -> None:
        if self._broken is None:
            self._broken = error
        self._wake()

    def _pause(self) -> None:
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
