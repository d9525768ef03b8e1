"""The event stream: a bounded ring of encoded events that all readers share.

Readers hold a position in the ring and no queue of their own, so a reader costs a number and a
slow one cannot make memory grow: it is dropped once the ring has moved past it, and catches up by
its last event id. Knows nothing of HTTP.
"""

import asyncio
import contextlib
from bisect import bisect_right
from collections import deque
from itertools import islice

import msgspec

from mlx_isolate_shared.clock import Clock
from mlx_isolate_shared.errors import CapacityError

# Kept events of each class. Two classes, so that a thousand small requests cannot push the one
# crash of this morning out of the replay.
LIFECYCLE_EVENTS_MAX = 512
REQUEST_EVENTS_MAX = 512
# Largest encoded event; a longer one loses its `detail` (a stderr tail, say). Bounds the ring.
EVENT_BYTES_MAX = 8 * 1024
# Readers at once; without it a loop of broken clients costs memory and time for ever.
READERS_MAX = 128
# Readers are woken at most this often, so that a burst of events costs one wake-up, not hundreds.
WAKE_INTERVAL_S = 0.05
# Bytes handed to a reader at once; bounds what lies in its transport.
READ_BYTES_MAX = 32 * 1024


class SlowReader(Exception):
    """The ring has moved past this reader's position; it has to connect again."""


class _Entry(msgspec.Struct, frozen=True):
    number: int
    model: str | None
    frame: bytes


class EventHub:
    """Publishes events to any number of readers; all calls happen on one event loop.

    Args:
        clock: time stamps of events.
        epoch: names this life of the supervisor within event ids, so that an id of an earlier
            life is recognized; default: the start time.
    """

    def __init__(self, clock: Clock, *, epoch: str | None = None) -> None:
        self._clock = clock
        self.epoch = epoch if epoch is not None else f"{int(clock.wall() * 1000):x}"
        self._number = 0
        self._rings: tuple[deque[_Entry], deque[_Entry]] = (
            deque(maxlen=LIFECYCLE_EVENTS_MAX),
            deque(maxlen=REQUEST_EVENTS_MAX),
        )
        # Highest number that has left a ring.
        self.lost = 0
        self._readers: set[EventReader] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._last_wake = float("-inf")
        self._wake_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.dropped_readers = 0

    def __repr__(self) -> str:
        """Its newest event and its readers."""
        return f"<EventHub {self.epoch}-{self._number} readers={len(self._readers)}>"

    @property
    def readers(self) -> int:
        """Readers connected now."""
        return len(self._readers)

    @property
    def newest(self) -> str:
        """Id of the newest event."""
        return f"{self.epoch}-{self._number}"

    def publish(self, kind: str, *, model: str | None = None, **fields: object) -> None:
        """Append one event, e.g. `publish("engine.ready", model="m", pid=7)`.

        Kinds that begin with `request.` are kept apart from all others (see the limits above).
        """
        self._number += 1
        body: dict[str, object] = {
            "id": self.newest,
            "time": round(self._clock.wall(), 3),
            "kind": kind,
            "model": model,
            **fields,
        }
        data = msgspec.json.encode(body)
        if len(data) > EVENT_BYTES_MAX:
            body.pop("detail", None)
            body["truncated"] = True
            data = msgspec.json.encode(body)
        frame = b"id: %s\nevent: %s\ndata: %s\n\n" % (self.newest.encode(), kind.encode(), data)
        ring = self._rings[1 if kind.startswith("request.") else 0]
        if len(ring) == ring.maxlen:
            self.lost = max(self.lost, ring[0].number)
        ring.append(_Entry(self._number, model, frame))
        self._wake_soon()

    def subscribe(
        self, *, last_event_id: str | None = None, replay: int = 0, model: str | None = None
    ) -> "EventReader":
        """A reader that starts behind `last_event_id`, or `replay` events back.

        An id of an earlier life of the supervisor starts at the oldest kept event: everything
        since is new to that client. A gap in the ring is told as a `gap` event.

        Args:
            last_event_id: the id that the client saw last, as in the header of that name.
            replay: without an id: how many kept events to begin with.
            model: only events of this model (those of no model always come).

        Raises:
            CapacityError: 503 when there are too many readers, or at shutdown.
        """
        if self._closed or len(self._readers) >= READERS_MAX:
            raise CapacityError(
                "too many readers of the event stream; close one and try again.",
                status=503,
                code="too_many_readers",
                retry_after_s=5,
            )
        position, missed = self._position(last_event_id, replay)
        reader = EventReader(self, position, model, self._hello(missed))
        self._readers.add(reader)
        return reader

    def close(self) -> None:
        """End every reader; what was published before is still delivered."""
        self._closed = True
        self._wake()

    def _position(self, last_event_id: str | None, replay: int) -> tuple[int, int]:
        """Number of the last event the reader has, and how many it missed for good."""
        if last_event_id:
            epoch, _, number = last_event_id.rpartition("-")
            if epoch != self.epoch:
                return 0, self._missed(0)
            if number.isdecimal() and len(number) <= 18 and int(number) <= self._number:
                return int(number), self._missed(int(number))
            return self._number, 0
        kept = sorted(entry.number for ring in self._rings for entry in ring)
        if replay <= 0 or not kept:
            return self._number, 0
        return kept[-min(replay, len(kept))] - 1, 0

    def _missed(self, position: int) -> int:
        """Events after `position` that the rings no longer hold."""
        held = sum(1 for ring in self._rings for entry in ring if entry.number > position)
        return self._number - position - held

    def _hello(self, missed: int) -> bytes:
        """The first frames of every reader; without an id, so that the client's stays."""
        hello = msgspec.json.encode({"epoch": self.epoch, "newest": self.newest})
        frame = b"retry: 1000\nevent: hello\ndata: %s\n\n" % hello
        if missed:
            frame += b'event: gap\ndata: {"missed":%d}\n\n' % missed
        return frame

    def collect(self, position: int, model: str | None) -> tuple[bytes, int]:
        """Frames after `position` up to READ_BYTES_MAX, and the position behind them."""
        frames: list[bytes] = []
        size = 0
        for entry in self._after(position):
            if size >= READ_BYTES_MAX:
                return b"".join(frames), position
            position = entry.number
            if model is None or entry.model is None or entry.model == model:
                frames.append(entry.frame)
                size += len(entry.frame)
        return b"".join(frames), self._number

    async def wait_event(self) -> bool:
        """Wait until something was published; False when the hub is closed."""
        if not self._closed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return not self._closed

    def leave(self, reader: "EventReader", *, slow: bool) -> None:
        """Forget a reader; harmless when done twice."""
        if reader in self._readers:
            self._readers.discard(reader)
            self.dropped_readers += slow

    def _after(self, position: int) -> list[_Entry]:
        """Kept entries with a higher number, in order."""
        parts: list[_Entry] = []
        for ring in self._rings:
            if ring and ring[-1].number > position:
                start = bisect_right(ring, position, key=lambda entry: entry.number)
                parts.extend(islice(ring, start, None))
        return sorted(parts, key=lambda entry: entry.number)

    def _wake_soon(self) -> None:
        if not self._waiters or self._wake_timer is not None:
            return
        loop = next(iter(self._waiters)).get_loop()
        pause = self._last_wake + WAKE_INTERVAL_S - loop.time()
        if pause > 0:
            self._wake_timer = loop.call_later(pause, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        self._wake_timer = None
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            self._last_wake = waiter.get_loop().time()
            if not waiter.done():
                waiter.set_result(None)


class EventReader:
    """One reader's position in the ring; made by `EventHub.subscribe`, closed by its owner."""

    def __init__(self, hub: EventHub, position: int, model: str | None, hello: bytes) -> None:
        self._hub = hub
        self._position = position
        self._model = model
        self._hello = hello
        # What was lost before this reader came is told by its gap event and does not end it.
        self._lost_known = hub.lost

    async def read(self, wait_s: float) -> bytes | None:
        """The next frames as bytes; b"" after `wait_s` without an event; None at the end.

        Raises:
            SlowReader: events that this reader has not had are gone from the ring.
        """
        if self._hello:
            hello, self._hello = self._hello, b""
            return hello
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (frames := self._take()):
                    if not await self._hub.wait_event():
                        return self._take() or None
                return frames
        return b""

    def close(self, *, slow: bool = False) -> None:
        """Leave the hub; harmless when done twice."""
        self._hub.leave(self, slow=slow)

    def _take(self) -> bytes:
        if self._position < self._hub.lost and self._hub.lost > self._lost_known:
            raise SlowReader
        frames, self._position = self._hub.collect(self._position, self._model)
        return frames
