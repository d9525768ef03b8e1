"""Named timers of one task: setting one replaces it, and one that was cancelled never acts.

A timer that fires only puts its message into the task's mailbox; between firing and handling it
may have been cancelled or set anew, so the handler asks `take` whether it still counts.
"""

import asyncio
import time
from collections.abc import Callable


class Timers:
    """Timers by name, for one mailbox.

    Args:
        on_fire: puts (name, ticket) into the mailbox.
        now: monotonic seconds, on the loop's own scale.
    """

    def __init__(
        self, on_fire: Callable[[str, int], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_fire = on_fire
        self._now = now
        # uvloop's handle of a call due at once has no `when`, so the time is kept beside it.
        self._tickets: dict[str, tuple[int, asyncio.TimerHandle, float]] = {}
        self._count = 0

    def set(self, name: str, delay_s: float) -> None:
        """Fire `name` once, not before `delay_s` has passed, instead of an earlier setting."""
        self.cancel(name)
        self._count += 1
        delay_s = max(0.0, delay_s)
        self._arm(name, self._count, self._now() + delay_s, delay_s)

    def _arm(self, name: str, ticket: int, due: float, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        handle = loop.call_later(delay_s, self._fire, name, ticket, due)
        self._tickets[name] = (ticket, handle, due)

    def _fire(self, name: str, ticket: int, due: float) -> None:
        # The loop counts from the start of its turn and in milliseconds, so it can be early.
        left_s = due - self._now()
        if left_s > 0:
            self._arm(name, ticket, due, left_s)
        else:
            self._on_fire(name, ticket)

    def cancel(self, name: str) -> None:
        """Forget `name`, whether it is set, fired or neither."""
        if (found := self._tickets.pop(name, None)) is not None:
            found[1].cancel()

    def cancel_all(self) -> None:
        """Forget all of them."""
        for name in tuple(self._tickets):
            self.cancel(name)

    def take(self, name: str, ticket: int) -> bool:
        """Whether the firing with `ticket` still counts; it counts once."""
        found = self._tickets.get(name)
        if found is None or found[0] != ticket:
            return False
        del self._tickets[name]
        return True

    @property
    def names(self) -> frozenset[str]:
        """Those that are set."""
        return frozenset(self._tickets)

    def left_s(self, name: str) -> float | None:
        """Time until `name` fires, None if it is not set."""
        found = self._tickets.get(name)
        if found is None:
            return None
        return max(0.0, found[2] - self._now())
