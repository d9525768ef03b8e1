"""One streamed response: each SSE event is one HTTP chunk in one write, headers come with the first.

Owns the moment at which headers are sent, the keepalives on a wall clock of silence, and
back-pressure: `send` waits while the client's socket is full. Knows no protocol.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

# Below this a transport's buffer is not paused (asyncio's low-water mark): writing cannot block.
_BUFFER_LOW_BYTES = 16 * 1024

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """A response that is not there until something is sent.

    Args:
        request: the request to answer.
        headers: further response headers.
        ping_interval_s: silence before a keepalive; 0 = none.
        keepalive: the bytes of one, from prompt tokens processed and of all.
    """

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        ping_interval_s: float,
        keepalive: Callable[[int, int], bytes],
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._response.enable_chunked_encoding()
        self._opening = asyncio.Lock()
        self._interval_s = ping_interval_s
        self._keepalive = keepalive
        self._clock = asyncio.get_running_loop().time
        self._last_write_at = self._clock()
        self._writes_waiting = 0
        self._pinger: asyncio.Task[None] | None = None
        self._done, self._total = 0, 0

    @property
    def request(self) -> web.Request:
        """The request that is answered."""
        return self._request

    @property
    def has_begun(self) -> bool:
        """Whether headers are out: from then on an error is an event."""
        return self._response.prepared

    def start_keepalives(self, total: int) -> None:
        """Begin to watch the silence; `total` is the length of the prompt in tokens."""
        self._total = total
        if self._interval_s > 0:
            self._pinger = asyncio.create_task(self._ping())

    def note_progress(self, done: int, total: int) -> None:
        """Prefill has come so far; the next keepalive says so."""
        self._done, self._total = done, total

    async def send(self, event: bytes) -> None:
        """Write one event; waits while the client does not read.

        Raises:
            ConnectionError: the client is gone.
        """
        if not self._response.prepared:
            await self._open()
        self._last_write_at = self._clock()
        if self._may_block(event):
            await self._outlast(self._response.write(event))
        else:
            await self._response.write(event)

    async def end(self, *, close_connection: bool = False) -> web.StreamResponse:
        """End the body; afterwards nothing can be sent."""
        self.stop_keepalives()
        if close_connection:
            self._response.force_close()
        await self._outlast(self._response.write_eof())
        return self._response

    def stop_keepalives(self) -> None:
        """Stop watching the silence; harmless when nobody does."""
        if self._pinger is not None:
            self._pinger.cancel()
            self._pinger = None

    def _may_block(self, event: bytes) -> bool:
        transport = self._request.transport
        if self._writes_waiting or transport is None:
            return True
        return transport.get_write_buffer_size() + len(event) > _BUFFER_LOW_BYTES

    async def _outlast(self, writing: Coroutine[Any, Any, None]) -> None:
        """Await a write in a task of its own, which a cancel of the caller does not reach.

        All writes of a connection that wait for its buffer wait for one future of aiohttp's, and
        a cancelled one leaves that future cancelled: every later write would then end as if its
        own task had been cancelled.
        """
        self._writes_waiting += 1
        task = asyncio.ensure_future(writing)
        task.add_done_callback(self._note_written)
        await asyncio.shield(task)

    def _note_written(self, task: asyncio.Task[None]) -> None:
        self._writes_waiting -= 1
        if not task.cancelled():
            task.exception()  # Told to the caller, if there still is one.

    async def _open(self) -> None:
        async with self._opening:
            if not self._response.prepared:
                await self._response.prepare(self._request)

    async def _ping(self) -> None:
        while True:
            silence_s = self._clock() - self._last_write_at
            if silence_s < self._interval_s:
                await asyncio.sleep(self._interval_s - silence_s)
            elif self._writes_waiting:
                # The client is not reading; a keepalive would only wait behind what it ignores.
                await asyncio.sleep(self._interval_s)
            else:
                try:
                    await self.send(self._keepalive(self._done, self._total))
                except ConnectionError:
                    return
