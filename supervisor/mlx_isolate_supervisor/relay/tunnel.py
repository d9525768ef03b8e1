"""Two connections whose bytes are each other's: what a client and an engine have after a 101.

Bytes are moved as they come. Of what the engine sends only the lengths of frames are followed, so
that a close frame with the reason can be set behind the last whole one when the engine dies.
"""

import asyncio
import contextlib
from typing import Any, Literal, cast

from aiohttp import web

from mlx_isolate_supervisor.relay.frames import FrameTracker, close_frame
from mlx_isolate_supervisor.relay.limits import CLIENT_STALL_LOOK_S, END_RUNNING_S
from mlx_isolate_supervisor.relay.socket_state import has_hung_up, read_now, unread_bytes

# Why bytes no longer pass both ways.
Ending = Literal["closed", "client_gone", "engine_gone", "client_stalled"]

# Once one side has ended, the other has so long to end too, counted from its last byte. A client
# that has left looks like one that only says no more, and an engine need not notice by itself.
CLOSING_S = 2.0


class _End(asyncio.Protocol):
    """One of the two connections: what arrives here is written there.

    Attributes:
        other: the end that gets what arrives here.
        bytes_in: what has arrived.
        frames: follows what arrives, where that matters.
    """

    def __init__(
        self, tunnel: "Tunnel", transport: asyncio.Transport, frames: FrameTracker | None
    ) -> None:
        self._tunnel = tunnel
        self.transport = transport
        self.frames = frames
        self.other: _End
        self.bytes_in = 0
        self.has_ended = False
        self.is_gone = False
        self.is_full = False

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self.bytes_in += len(data)
        if self.other.takes_more:
            self.other.transport.write(data)
            if self.frames is not None:
                self.frames.feed(data)

    def eof_received(self) -> bool:
        """Called by the event loop: no more will come, though more may be sent."""
        self.has_ended = True
        self._tunnel.end_reached(self)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self.has_ended = self.is_gone = True
        self._tunnel.end_reached(self)

    def pause_writing(self) -> None:
        """Called by the event loop: this side reads too slowly."""
        self.is_full = True
        self.other.pause()
        self._tunnel.fullness_changed(self)

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self.is_full = False
        self.other.resume()
        self._tunnel.fullness_changed(self)

    @property
    def takes_more(self) -> bool:
        """Whether something may be written here."""
        return not self.is_gone and not self.transport.is_closing()

    def pause(self) -> None:
        """Take no more from the network until `resume`."""
        if self.takes_more:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Take what comes from the network."""
        if self.takes_more:
            self.transport.resume_reading()

    def end_writing(self) -> None:
        """Half-close: this side gets no more, and may still send."""
        if self.takes_more and self.transport.can_write_eof():
            # It may have left in this very turn.
            with contextlib.suppress(OSError, RuntimeError):
                self.transport.write_eof()


class _ClientEnd(_End):
    """The client's end; aiohttp's protocol, which had it before, still learns of its loss.

    Attributes:
        was_full: whether it had not taken what was written before; that is told once only.
    """

    def __init__(
        self, tunnel: "Tunnel", transport: asyncio.Transport, before: web.RequestHandler
    ) -> None:
        super().__init__(tunnel, transport, None)
        self._before = before
        self.was_full = before.writing_paused

    def resume_writing(self) -> None:
        """Called by the event loop."""
        super().resume_writing()
        if self._before.writing_paused:
            # It hangs up on clients that stay so.
            self._before.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        super().connection_lost(exc)
        self._before.connection_lost(exc)


class Tunnel:
    """Takes two transports over from their protocols, at once, and joins them.

    Args:
        client: the client's connection; its 101 is written.
        engine: the engine's connection.
        early: what the engine has sent behind its head.
        stall_s: longest time in which a client may read nothing.
    """

    def __init__(
        self,
        client: asyncio.Transport,
        engine: asyncio.Transport,
        early: bytes,
        *,
        stall_s: float,
    ) -> None:
        self._stall_s = stall_s
        self._frames = FrameTracker()
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._client_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._hang_up_timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        before = cast(web.RequestHandler, client.get_protocol())
        self._client = _ClientEnd(self, client, before)
        self._engine = _End(self, engine, self._frames)
        self._client.other, self._engine.other = self._engine, self._client
        client.set_protocol(self._client)
        engine.set_protocol(self._engine)
        if self._client.was_full:
            self._client.pause_writing()
        if early:
            self._engine.data_received(early)

    @property
    def bytes_passed(self) -> int:
        """Bytes that the engine has sent."""
        return self._engine.bytes_in

    @property
    def bytes_in(self) -> int:
        """Bytes that the client has sent."""
        return self._client.bytes_in

    @property
    def events_passed(self) -> int:
        """Frames that the engine has sent."""
        return self._frames.frames

    @property
    def is_closed_in_form(self) -> bool:
        """Whether the engine has sent a close frame."""
        return self._frames.is_closed

    def feed_client(self, data: bytes) -> None:
        """Pass on what the client has sent before its connection was taken over."""
        if data:
            self._client.data_received(data)

    async def wait_ending(self) -> Ending:
        """Wait until bytes no longer pass both ways."""
        return await asyncio.shield(self._ending)

    async def close(self, code: int, reason: str) -> None:
        """End both connections; the client is told why where a frame may begin.

        Called again after it was cut off, which a shutdown does as soon as the engine has ended,
        it gives the client a last moment.
        """
        self._stop_timers()
        self._engine.transport.abort()
        client = self._client
        if client.takes_more and self._frames.is_at_boundary:
            # Closed with something unread in it, the connection would be reset, and the frame
            # lost; so what the client still sends is read and dropped for a while.
            client.resume()
            if self._is_closing:
                await asyncio.wait((self._client_ended,), timeout=END_RUNNING_S / 2)
            else:
                self._is_closing = True
                if not self._frames.is_closed:
                    client.transport.write(close_frame(code, reason))
                client.end_writing()
                await self._wait_client()
        self.abort()

    async def _wait_client(self) -> None:
        """Wait until the client has closed too, as long as it takes what is on its way to it."""
        quiet_s = 0.0
        left = unread_bytes(self._client.transport)
        while quiet_s < (self._stall_s if left else CLOSING_S):
            await asyncio.wait((self._client_ended,), timeout=CLOSING_S)
            if self._client_ended.done() or not self._client.takes_more:
                return
            before, left = left, unread_bytes(self._client.transport)
            quiet_s = quiet_s + CLOSING_S if left >= before else 0.0

    def abort(self) -> None:
        """Drop both connections."""
        self._stop_timers()
        for end in (self._engine, self._client):
            if not end.is_gone:
                end.transport.abort()

    def note_death(self) -> None:
        """Nothing of the engine runs any more: pass on what it has still written, and end there.

        The kernel closes its connections only when it has dropped its memory. A client that takes
        no more for now learns of it then.
        """
        engine = self._engine
        while engine.takes_more and not self._client.is_full:
            try:
                data = read_now(engine.transport)
            except OSError:
                break
            if not data:
                break
            engine.data_received(data)
        if not self._client.is_full:
            self.end_reached(engine)

    # What the two ends tell.

    def end_reached(self, end: _End) -> None:
        """Nothing more comes from `end`, or it is gone altogether."""
        if end is self._client:
            if end.is_gone:
                self._end("client_gone")
            if not self._client_ended.done():
                self._client_ended.set_result(None)
                self._look_at_rest(-1)
            self._engine.end_writing()
        elif self._client.has_ended:
            self._end("client_gone")
        elif self._frames.is_closed and self._frames.is_at_boundary:
            self._end("closed")
        else:
            self._end("engine_gone")

    def _look_at_rest(self, before: int) -> None:
        """A client has said all: follow what the engine still sends, until it falls silent."""
        if self._engine.bytes_in == before and not self._client.is_full:
            self._end("client_gone")
        elif not self._ending.done():
            loop = asyncio.get_running_loop()
            self._rest_timer = loop.call_later(CLOSING_S, self._look_at_rest, self._engine.bytes_in)

    def fullness_changed(self, end: _End) -> None:
        """`end` takes no more for now, or takes more again."""
        if end is self._engine:
            self._look_at_hang_up()
            return
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if end.is_full and not self._ending.done():
            self._watch_stall(unread_bytes(end.transport))

    def _look_at_hang_up(self) -> None:
        """While nothing is read from a client, the event loop does not tell that it broke off."""
        if self._hang_up_timer is not None:
            self._hang_up_timer.cancel()
            self._hang_up_timer = None
        if not self._engine.is_full or self._ending.done():
            return
        if has_hung_up(self._client.transport):
            self._end("client_gone")
            return
        look_s = min(CLIENT_STALL_LOOK_S, self._stall_s)
        loop = asyncio.get_running_loop()
        self._hang_up_timer = loop.call_later(look_s, self._look_at_hang_up)

    def _watch_stall(self, unread: int) -> None:
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self._stall_s, self._look_at_stall, unread)

    def _look_at_stall(self, before: int) -> None:
        if not self._client.takes_more:
            return
        unread = unread_bytes(self._client.transport)
        if unread >= before:
            self._end("client_stalled")
        else:
            self._watch_stall(unread)

    def _stop_timers(self) -> None:
        for timer in (self._stall_timer, self._rest_timer, self._hang_up_timer):
            if timer is not None:
                timer.cancel()
        self._stall_timer = self._rest_timer = self._hang_up_timer = None

    def _end(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)


class _EarlyBytes:
    """What a client has sent behind its request, as aiohttp hands it over with the connection.

    Stands where aiohttp expects the parser of its own WebSockets.
    """

    def __init__(self) -> None:
        self.data = b""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Called by aiohttp."""
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        """Called by aiohttp."""


def take_early(protocol: web.RequestHandler) -> bytes:
    """What aiohttp has received behind the head of a request with an upgrade; it keeps no more."""
    early = _EarlyBytes()
    protocol.set_parser(cast(Any, early))
    return early.data
