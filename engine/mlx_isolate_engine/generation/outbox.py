"""What one completion hands from the generation thread to the event loop, and what is unread."""

import asyncio
from collections import deque
from collections.abc import Callable

from mlx_isolate_engine.completion.events import (
    CompletionSummary,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallDelta,
)
from mlx_isolate_shared.errors import EngineError

End = CompletionSummary | EngineError

# A parked row comes back when its reader has worked off so much of its buffer; coming back at the
# first byte would park it again at once.
RESUME_SHARE = 0.5

# What an event weighs beside its text: the object, and its frame on the way out.
EVENT_BYTES = 64
# What each token of a `logprobs` weighs: the object, its text, its bytes and its number. Left out,
# a stalled reader who asked for 20 alternatives held thirty times what it was counted for.
LOGPROB_BYTES = 192


def weigh(event: Event) -> int:
    """Bytes that an unread event counts for."""
    # By far the most frequent first: this runs for every token, twice.
    if isinstance(event, ContentDelta | ReasoningDelta):
        size = EVENT_BYTES + len(event.text)
        if isinstance(event, ContentDelta) and event.logprobs:
            size += LOGPROB_BYTES * sum(1 + len(token.top) for token in event.logprobs)
        return size
    if isinstance(event, ToolCallDelta):
        return EVENT_BYTES + len(event.arguments)
    return EVENT_BYTES


class Outbox:
    """Events of one completion on their way; the generation thread writes, the loop reads.

    `written` belongs to the generation thread and `read` to the event loop, so that either may
    look at the other's without a lock; both are bytes as `weigh` counts them.
    """

    def __init__(self) -> None:
        self.written = 0
        self.read = 0
        self._events: deque[Event] = deque()
        self._end: End | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unread_bytes(self) -> int:
        """Bytes written and not yet read."""
        return self.written - self.read

    def deliver(self, events: list[Event], end: End | None) -> None:
        """Event loop only: what one step of the generation thread produced."""
        self._events.extend(events)
        if end is not None:
            self._end = end
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pop(self) -> Event | None:
        """Event loop only: the next event, if one is there."""
        return self._events.popleft() if self._events else None

    async def wait_end_or_event(self) -> End | None:
        """Wait until an event is there (None) or the end is (the end itself)."""
        while not self._events:
            if self._end is not None:
                return self._end
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return None


class Deliveries:
    """Collects what one step produced for all completions, and crosses to the loop once.

    Args:
        loop: the event loop whose callbacks read the outboxes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: dict[Outbox, tuple[list[Event], list[End]]] = {}

    def add(self, outbox: Outbox, events: list[Event]) -> None:
        """Queue events for `outbox`."""
        if not events:
            return
        for event in events:
            outbox.written += weigh(event)
        pending = self._pending.get(outbox)
        if pending is None:
            self._pending[outbox] = (events, [])
        else:
            pending[0].extend(events)

    def end(self, outbox: Outbox, end: End) -> None:
        """Queue the one end of `outbox`, after all its events."""
        ends = self._pending.setdefault(outbox, ([], []))[1]
        assert not ends, "a completion ends once"
        ends.append(end)

    def flush(self) -> None:
        """Hand everything over with one wake-up of the event loop."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        self.call(_deliver_all, pending)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run `function` on the event loop; dropped if the loop has closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


def _deliver_all(pending: dict[Outbox, tuple[list[Event], list[End]]]) -> None:
    for outbox, (events, ends) in pending.items():
        outbox.deliver(events, ends[0] if ends else None)
