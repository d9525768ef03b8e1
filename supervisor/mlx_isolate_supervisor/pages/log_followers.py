"""Those who follow the log: so many at a time, and none that does not read.

A follower holds a place in the log book and what lies in its transport, so that neither many of
them nor slow ones make memory grow.
"""

import asyncio
from contextlib import aclosing

from aiohttp import web

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.telemetry.logs import LogBook

# Followers at once; without it a loop of broken clients costs memory and time for ever.
FOLLOWERS_MAX = 128
# A follower that takes nothing for this long is cut off.
STALLED_FOLLOWER_S = 10.0
# Bytes that may wait in the transport of one follower before a write waits.
WRITE_BUFFER_BYTES = 16 * 1024

HEADERS = {
    "Content-Type": "text/plain; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class LogFollowers:
    """Answers whoever asks for the log and what follows.

    Args:
        book: the log.

    Attributes:
        count: followers now.
    """

    def __init__(self, book: LogBook) -> None:
        self._book = book
        self.count = 0

    async def serve(
        self, request: web.Request, lines: int, model: str | None
    ) -> web.StreamResponse:
        """The last `lines` lines, of everything or of one model, then each new one.

        Raises:
            CapacityError: 503 when there are too many followers.
        """
        if self.count >= FOLLOWERS_MAX:
            raise CapacityError(
                "too many followers of the log; close one and try again.",
                status=503,
                code="too_many_readers",
                retry_after_s=5,
            )
        self.count += 1
        try:
            return await self._serve(request, lines, model)
        finally:
            self.count -= 1

    async def _serve(
        self, request: web.Request, lines: int, model: str | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        if request.transport is not None:
            request.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        async with aclosing(self._book.follow(lines, model)) as groups:
            async for group in groups:
                try:
                    async with asyncio.timeout(STALLED_FOLLOWER_S):
                        await response.write("".join(line + "\n" for line in group).encode())
                except TimeoutError:
                    # Cut, not closed: what waits in the transport would be held for it for ever.
                    if request.transport is not None:
                        request.transport.abort()
                    break
        return response
