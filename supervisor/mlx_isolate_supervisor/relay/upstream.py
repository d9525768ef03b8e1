"""One connection to an engine's socket: a request out, an answer's head and body in.

Reads only what it must of either: the head is read by `answer_start`, the body by `framing`.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from mlx_isolate_supervisor.relay import socket_state
from mlx_isolate_supervisor.relay.answer_head import AnswerHead
from mlx_isolate_supervisor.relay.answer_start import AnswerStart
from mlx_isolate_supervisor.relay.body_sink import BodySink
from mlx_isolate_supervisor.relay.engine_gone import (
    ClientGivenUp,
    EngineGone,
    RequestUnread,
    says_unread,
)
from mlx_isolate_supervisor.relay.framing import (
    ONE_EVENT_BYTES_MAX,
    ONE_EVENT_END,
    ONE_EVENT_HEADS,
    ONE_EVENT_STARTS,
    ONE_EVENT_TAIL,
    Body,
    FramingError,
)

# Below this a request's head and body leave in one write, which costs one copy.
_JOIN_BYTES_MAX = 64 * 1024
# How much may pass between two looks at the client's back-pressure; a look costs as much as the
# passing of an event.
_PRESSURE_STEP_BYTES = 16 * 1024


class EngineConnection(asyncio.Protocol):
    """A connection that carries one request at a time; its owner is the only one who waits on it."""

    # Slots are faster to read and write, and `data_received` does little else.
    __slots__ = (
        "_broken",
        "_granted_bytes",
        "_is_doomed",
        "_is_paused",
        "_last",
        "_left_bytes",
        "_single_events",
        "_sink",
        "_start",
        "_takes_all",
        "_transport",
        "_waiter",
        "_write_event",
    )

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._broken: EngineGone | FramingError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._start = AnswerStart()
        self._sink: BodySink | None = None
        # The sink's write while a piece that is one whole event may go there unfed.
        self._write_event: Callable[[bytes], object] | None = None
        self._single_events = 0
        # What was handed out last; how an engine ends a stream is told by nothing else.
        self._last = b""
        # What may pass until the sink is asked again whether it is full; the difference of the
        # two is what has passed.
        self._granted_bytes = 0
        self._left_bytes = 0
        self._is_paused = self._is_doomed = self._takes_all = False

    def __repr__(self) -> str:
        """What it is doing."""
        if self._broken is not None:
            return f"<EngineConnection broken: {self._broken}>"
        start = self._start
        state = "idle" if not start.is_awaited else "head" if start.head is None else "body"
        return f"<EngineConnection {state}{' paused' if self._is_paused else ''}>"

    # What the owner calls.

    def send(
        self, head: bytes, body: bytes, *, is_bodiless: bool = False, may_upgrade: bool = False
    ) -> None:
        """Send one request. Afterwards it must not be sent again, except after RequestUnread.

        Args:
            is_bodiless: whether its answer has no body whatever its head says (HEAD).
            may_upgrade: whether its answer may be a 101.
        """
        assert not self._start.is_awaited
        self._start.begin(is_bodiless=is_bodiless, may_upgrade=may_upgrade)
        self._single_events = self._granted_bytes = self._left_bytes = 0
        if self._broken is not None or self._transport is None:
            # It ended between the moment in which it was taken and this one.
            self._broken = RequestUnread("the engine closed before the request was sent")
            return
        if len(body) <= _JOIN_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def wait_head(self) -> AnswerHead:
        """The final head of the answer; informational ones are skipped.

        Raises:
            RequestUnread: the connection ended before the engine had read the request.
            EngineGone: the connection ended first.
            FramingError: these are no HTTP answers.
        """
        start = self._start
        while start.head is None:
            await self._wait()
        return start.head

    def take_over(self) -> tuple[asyncio.Transport, bytes]:
        """The connection itself, and what has come behind the head of a 101.

        Whoever takes it must give it another protocol in the same turn of the loop.

        Raises:
            EngineGone: it has ended already.
        """
        if self._broken is not None or self._transport is None:
            raise EngineGone("the engine closed the connection")
        early = self._start.take()
        self._resume()
        transport, self._transport = self._transport, None
        return transport, early

    async def read_whole(self) -> bytes:
        """The whole body of an answer; only for answers of a known, small length."""
        body = self._start.body
        assert body is not None
        while not body.has_ended:
            self._resume()
            if not body.has_ended:
                await self._wait()
        return self._start.take()

    async def pass_body(self, sink: BodySink) -> None:
        """Hand the body to `sink` until its end; the engine waits while the sink is full.

        Raises:
            ClientGivenUp: as EngineGone, while the sink was full.
            EngineGone: the connection ended first; everything whole has been handed over.
            FramingError: the engine's framing is wrong; likewise.
        """
        body = self._start.body
        assert body is not None
        early = self._start.take()
        sink.begin(early)
        self._sink = sink
        self._last = early
        self._note_passed(sink, body, len(early))
        while True:
            if self._is_paused:
                await sink.drain(self._has_hung_up)
                if sink.writing_paused and self._has_hung_up():
                    self._take_last()
                self._resume()
            if body.has_ended:
                return
            if not self._is_paused:
                await self._wait()

    @property
    def bytes_passed(self) -> int:
        """Body bytes of the current answer that the sink was handed, framing included."""
        return self._granted_bytes - self._left_bytes

    @property
    def events_passed(self) -> int:
        """Chunks of the current answer that were handed out."""
        body = self._start.body
        return self._single_events + (0 if body is None else body.chunks)

    @property
    def last_passed(self) -> bytes:
        """What the sink was handed last: one or more whole events of a stream."""
        return self._last

    @property
    def is_reusable(self) -> bool:
        """Whether the answer is over and the engine will take another request here."""
        head, body = self._start.head, self._start.body
        return (
            self._broken is None
            and self._transport is not None
            and head is not None
            and head.keeps_alive
            and body is not None
            and body.has_ended
            and not body.surplus
            and not self._transport.get_write_buffer_size()
        )

    def rest(self) -> None:
        """Become idle after an answer; only when `is_reusable`."""
        assert self.is_reusable
        self._start.end()
        self._last = b""
        self._sink = self._write_event = None
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
        if self._broken is not None or self._transport is None:
            return False
        return socket_state.is_silent(self._transport)

    def note_death(self) -> None:
        """Nothing of the engine runs any more: take what it has still written, and end there.

        The kernel closes its end of the connection only after it has dropped the engine's
        memory, which takes a second for a large model.
        """
        self._is_doomed = True
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # The loop has read how it ended, and tells in its next turn.
        is_unread = self._start.is_unanswered and socket_state.unread_bytes(transport) > 0
        # Or it has closed it already, in this very turn of the loop.
        is_unread = says_unread(self._read_rest()) or is_unread
        if (is_unread and self._start.is_unanswered) or not self._is_paused:
            self._note_end(is_unread)

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
        """Called by the event loop; the hot path of every stream.

        A piece that is exactly one event goes straight to the client's transport. Everything
        else is fed to the body. Every operation here is paid for by each token of each stream.
        """
        write = self._write_event
        if write is not None:
            size = len(data)
            if (
                size < ONE_EVENT_BYTES_MAX
                and data[ONE_EVENT_TAIL] == ONE_EVENT_END
                and data[ONE_EVENT_HEADS[size]] == ONE_EVENT_STARTS[size]
            ):
                try:
                    write(data)
                except RuntimeError:
                    # uvloop's word for a client whose connection has just ended; its request's
                    # task is told of that in the loop's next turn, and closes this one.
                    return
                self._last = data
                self._single_events += 1
                self._left_bytes = left = self._left_bytes - size
                if left < 0:
                    self._look_at_pressure()
                return
        self._feed(data)

    def eof_received(self) -> None:
        """Called by the event loop."""
        transport = self._transport
        self._note_end(transport is not None and transport.get_write_buffer_size() > 0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        self._note_end(says_unread(exc))

    # The rest is private.

    def _note_end(self, is_unread: bool) -> None:
        if is_unread and self._start.is_unanswered:
            self._break(RequestUnread("the engine ended before it had read the request"))
        else:
            self._break(EngineGone("the connection to the engine ended"))

    def _has_hung_up(self) -> bool:
        return self._transport is None or socket_state.has_hung_up(self._transport)

    def _take_last(self) -> None:
        """Hand out what the engine wrote before its end, full as the sink may be: a socket's fill."""
        self._takes_all = True
        self._is_paused = False
        self._read_rest()
        self._break(ClientGivenUp("the engine closed while the client did not read"))

    def _read_rest(self) -> OSError | None:
        """Read what the connection holds, as far as the client takes it; how it broke, if it did."""
        while self._transport is not None and self._broken is None and not self._is_paused:
            try:
                data = socket_state.read_now(self._transport)
            except OSError as error:
                return error
            if not data:
                break
            self.data_received(data)
        return None

    def _feed(self, data: bytes) -> None:
        try:
            if self._sink is None:
                self._take_early(data)
            else:
                self._pass(self._sink, data)
        except FramingError as error:
            # Nothing after a wrong byte can be trusted.
            self._break(error)
            self.close()

    def _take_early(self, data: bytes) -> None:
        if self._start.feed(data):
            if self._start.is_full:
                self._pause()
            self._wake()

    def _pass(self, sink: BodySink, data: bytes) -> None:
        body = self._start.body
        assert body is not None
        block = body.feed(data)
        if block:
            try:
                sink.write(block)
                self._last = block
            except RuntimeError:
                block = b""  # as in data_received
        self._note_passed(sink, body, len(block))
        if body.has_ended:
            self._wake()

    def _note_passed(self, sink: BodySink, body: Body, size: int) -> None:
        if size:
            self._left_bytes -= size
            self._look_at_pressure()
        self._write_event = sink.write if body.is_at_boundary and self.bytes_passed else None

    def _look_at_pressure(self) -> None:
        assert self._sink is not None
        self._granted_bytes += _PRESSURE_STEP_BYTES - self._left_bytes
        self._left_bytes = _PRESSURE_STEP_BYTES
        if self._sink.writing_paused and not self._is_paused and not self._takes_all:
            self._pause()
            self._wake()

    async def _wait(self) -> None:
        """Wait for the next wake-up; raises what has broken the connection."""
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
            if self._is_doomed:
                self.note_death()
