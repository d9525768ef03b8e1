"""The client's side of an answer under way: raw writes, and the wait for a client that is slow."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from mlx_isolate_supervisor.relay.answer import RelayedAnswer
from mlx_isolate_supervisor.relay.framing import unframe
from mlx_isolate_supervisor.relay.limits import CLIENT_STALL_LOOK_S
from mlx_isolate_supervisor.relay.socket_state import unread_bytes


class ClientStalled(Exception):
    """The client read nothing for too long."""


class ClientSink:
    """Writes an answer to the transport of its request.

    Args:
        answer: is begun with the first block.
        is_unframed: whether blocks are chunks whose framing the client does not know.
        stall_s: longest time in which the client may read nothing.
        on_first: called before the first block.
    """

    def __init__(
        self,
        request: web.Request,
        answer: RelayedAnswer,
        *,
        stall_s: float,
        is_unframed: bool,
        on_first: Callable[[], None],
    ) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self._answer = answer
        self._transport = transport
        self._protocol = request.protocol
        self._writer = request.writer
        self._stall_s = stall_s
        self._on_first = on_first
        self._is_unframed = is_unframed
        # Bound once: this is called for every event of every stream.
        self.write: Callable[[bytes], None] = self._write_first

    def begin(self, block: bytes) -> None:
        """Write the head and what has come with it, which may be nothing.

        Raises:
            ConnectionError: the client has gone.
        """
        if block:
            self._note_first()
        self._answer.begin(unframe(block) if self._is_unframed else block)

    def _write_first(self, block: bytes) -> None:
        self._note_first()
        self.write(block)

    def _note_first(self) -> None:
        self._on_first()
        self.write = self._write_unframed if self._is_unframed else self._transport.write

    def _write_unframed(self, chunks: bytes) -> None:
        self._transport.write(unframe(chunks))

    @property
    def writing_paused(self) -> bool:
        """Whether the client's transport buffers more than its high-water mark."""
        return self._protocol.writing_paused

    async def drain(self, is_over: Callable[[], bool]) -> None:
        """Wait until the client has read enough, or `is_over` says that nothing more will come.

        Raises:
            ClientStalled: it read nothing for `stall_s`.
            ConnectionError: it has gone.
        """
        loop = asyncio.get_running_loop()
        left, since = unread_bytes(self._transport), loop.time()
        # A task of its own: aiohttp's drain must not be cancelled by a timeout, since it would
        # find its own cancelled future at the next call.
        drained = asyncio.ensure_future(self._writer.drain())
        try:
            while True:
                look_s = min(CLIENT_STALL_LOOK_S, self._stall_s)
                await asyncio.wait((drained,), timeout=look_s)
                if drained.done():
                    return drained.result()
                if is_over():
                    return
                now = unread_bytes(self._transport)
                if now < left:
                    left, since = now, loop.time()
                elif loop.time() - since >= self._stall_s:
                    raise ClientStalled
        finally:
            drained.cancel()

    def leave_unread(self) -> None:
        """Nothing more is written; if its client reads none of it for `stall_s`, hang up.

        Without this a client that never reads again would keep its connection for ever.
        """
        self._look_at_rest(None)

    def _look_at_rest(self, before: int | None) -> None:
        if not self._transport.get_write_buffer_size():
            return
        unread = unread_bytes(self._transport)
        if before is not None and unread >= before:
            self._transport.abort()
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self._stall_s, self._look_at_rest, unread)

    def close(self) -> None:
        """Close after what was written, without the end that the answer's framing asks for."""
        self._transport.close()
