"""Keeps a streaming client company while its model loads or its request waits (sendLoadingState).

Comments of the event stream say what is waited for. The first one commits the client to a 200, so
none is sent before a refusal would have come at once; what fails after it is told as an event.
"""

import asyncio

from aiohttp import web

from mlx_isolate_shared.errors import HttpError
from mlx_isolate_supervisor.relay.answer import RelayedAnswer
from mlx_isolate_supervisor.relay.answer_head import AnswerHead, parse_head
from mlx_isolate_supervisor.relay.error_wire import error_event, raw_error_event
from mlx_isolate_supervisor.relay.framing import frame
from mlx_isolate_supervisor.relay.limits import RelayLimits
from mlx_isolate_supervisor.slots.lease import Admission

# A client that takes nothing is told nothing more.
UNREAD_BYTES_MAX = 16 * 1024

_HEAD = parse_head(
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\nTransfer-Encoding: chunked"
)


class Company:
    """Of one request; says nothing unless it is started.

    Attributes:
        request: whose client it is.
        answer: the answer that the first comment has begun; None while nothing was sent.
    """

    def __init__(self, request: web.Request, path: str, limits: RelayLimits) -> None:
        self.request = request
        self._limits = limits
        self._path = path
        self._timer: asyncio.TimerHandle | None = None
        self._told = ""
        self._told_at = 0.0
        self.answer: RelayedAnswer | None = None

    def start(self, admission: Admission) -> None:
        """Tell from time to time what `admission` says is waited for, until `stop`."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.loading_look_s, self._look, admission)

    def stop(self) -> None:
        """The wait is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, admission: Admission) -> None:
        loop = asyncio.get_running_loop()
        state, now = admission.describe_wait(), loop.time()
        transport = self.request.transport
        if transport is None or transport.is_closing():
            return
        is_due = state != self._told or now - self._told_at >= self._limits.loading_silence_s
        if is_due and transport.get_write_buffer_size() <= UNREAD_BYTES_MAX:
            self._told, self._told_at = state, now
            self._write(f": {state}\n\n".encode())
        self._timer = loop.call_later(self._limits.loading_look_s, self._look, admission)

    def _write(self, event: bytes) -> None:
        if self.answer is None:
            self.answer = RelayedAnswer(self.request, _HEAD)
            self.answer.begin(b"")
        self.answer.add(frame(event) if self.answer.is_chunked else event)

    # -- Once the answer has begun ----------------------------------------------------------------

    def may_continue(self, head: AnswerHead) -> bool:
        """Whether the engine's answer can follow the comments as it is."""
        return head.status == 200 and head.is_event_stream and head.length is None

    def end(self, error: HttpError) -> RelayedAnswer:
        """The request is refused or has failed: tell it as an event, and end."""
        return self._end(error_event(error, self._path))

    def end_with(self, body: bytes, *, is_error: bool) -> RelayedAnswer:
        """The engine answered with JSON: tell it as an event, and end."""
        body = b" ".join(body.splitlines())
        if is_error:
            return self._end(raw_error_event(body, self._path))
        return self._end(b"data: " + body + b"\n\n")

    def _end(self, event: bytes) -> RelayedAnswer:
        self.stop()
        self._write(event)
        assert self.answer is not None
        return self.answer
