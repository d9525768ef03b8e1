"""Who waits for a place in an engine, and who holds one.

The queue and the leases of one slot as plain objects; only the slot's messages change them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from mlx_isolate_shared.errors import CapacityError, EngineError
from mlx_isolate_supervisor.slots.lease import Outcome


class Holder(Protocol):
    """The incarnation that a lease is a place in."""

    @property
    def socket_path(self) -> str:
        """Where it listens."""
        ...

    @property
    def number(self) -> int:
        """Its incarnation number."""
        ...

    @property
    def is_dying(self) -> bool:
        """Whether nothing of it runs any more."""
        ...

    async def death(self) -> EngineError:
        """See `lease.Lease.death`."""
        ...


class SlotLease:
    """A place in one incarnation; implements `lease.Lease`.

    Attributes:
        is_upgraded: whether it is held by a connection without an end of its own.
    """

    def __init__(
        self,
        holder: Holder,
        request_id: str,
        on_release: Callable[["SlotLease", Outcome], None],
        on_upgrade: Callable[[], None],
    ) -> None:
        self._holder = holder
        self._on_release = on_release
        self._on_upgrade = on_upgrade
        self.is_upgraded = False
        self._is_released = False
        self._on_death: Callable[[], None] | None = None
        self.request_id = request_id

    def __repr__(self) -> str:
        """Who holds it, where, and whether still."""
        state = "released" if self._is_released else "held"
        return f"<SlotLease {self.request_id} in #{self.incarnation}, {state}>"

    @property
    def socket_path(self) -> str:
        """Where that incarnation listens."""
        return self._holder.socket_path

    @property
    def incarnation(self) -> int:
        """Number of the incarnation, from 1."""
        return self._holder.number

    def on_death(self, call: Callable[[], None]) -> None:
        """Have `call` called when the engine is known to be dying; see `lease.Lease`."""
        if self._holder.is_dying:
            call()
        else:
            self._on_death = call

    def tell_death(self) -> None:
        """The engine is dying: tell who holds this place."""
        call, self._on_death = self._on_death, None
        if call is not None and not self._is_released:
            call()

    async def death(self) -> EngineError:
        """What to tell the client after the connection to the engine broke."""
        return await self._holder.death()

    def note_upgrade(self) -> None:
        """See `lease.Lease.note_upgrade`."""
        self.is_upgraded = True
        self._on_upgrade()

    def release(self, outcome: Outcome) -> None:
        """Give the place back, exactly once."""
        assert not self._is_released, f"{self!r} released twice"
        self._is_released = True
        self._on_release(self, outcome)


class Waiter:
    """One request that waits for a place."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.place: asyncio.Future[SlotLease] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        # When it joined the line, monotonic seconds.
        self.arrived_s = 0.0

    async def wait_place(self) -> SlotLease:
        """The lease, once it is granted; a lease that comes too late is given back.

        Raises:
            CapacityError: refused instead.
        """
        try:
            return await self.place
        except asyncio.CancelledError:
            # Granted in the same turn of the loop in which the client left.
            if self.place.done() and not self.place.cancelled() and not self.place.exception():
                self.place.result().release("cancelled")
            raise
        finally:
            if self.timer is not None:
                self.timer.cancel()


class WaitingLine:
    """First come, first served; those who left are skipped."""

    def __init__(self) -> None:
        self._line: deque[Waiter] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._line)

    def __iter__(self) -> Iterator[Waiter]:
        """From the first to the last."""
        return iter(self._line)

    @property
    def first(self) -> Waiter | None:
        """Who has waited longest, None if nobody waits."""
        while self._line and self._line[0].place.done():
            self._line.popleft()
        return self._line[0] if self._line else None

    def join(self, waiter: Waiter) -> None:
        """Stand at the end."""
        self._line.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Stand in it no more, wherever that was."""
        if waiter in self._line:
            self._line.remove(waiter)

    def grant_first(self, make_lease: Callable[[Waiter], SlotLease]) -> SlotLease | None:
        """Give the first who still waits a lease; None if nobody does."""
        while self._line:
            waiter = self._line.popleft()
            if not waiter.place.done():
                lease = make_lease(waiter)
                waiter.place.set_result(lease)
                return lease
        return None

    def refuse(self, waiter: Waiter, error: CapacityError) -> None:
        """Turn one away."""
        self.leave(waiter)
        if not waiter.place.done():
            waiter.place.set_exception(error)

    def refuse_all(self, make_error: Callable[[], CapacityError]) -> int:
        """Turn everybody away; returns how many."""
        count = 0
        for waiter in tuple(self._line):
            self.refuse(waiter, make_error())
            count += 1
        return count
