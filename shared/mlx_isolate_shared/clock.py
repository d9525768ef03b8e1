"""Time as what tests can replace; waits on an event loop go by that of the loop."""

import time
from typing import Protocol


class Clock(Protocol):
    """Reads of time, in seconds."""

    def monotonic(self) -> float:
        """Seconds that never go back; for durations and deadlines."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for display and file times only."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds that never go back; for durations and deadlines."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch; for display and file times only."""
        return time.time()
