"""What signals that end a daemon mean, one after the other; pure."""

from collections.abc import Callable
from typing import Literal

# Who runs the daemon in its own process group and passes signals on (timeout, npm, a shell script)
# sends each of them twice, a moment apart; that is one wish. No finger is as quick.
REPEAT_S = 0.1


class StopSignals:
    """The signals so far.

    Args:
        now: seconds of a clock that never goes back.

    Attributes:
        cut_by: the number of the one that cut; None while none has.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._first: int | None = None
        self._first_at = 0.0
        self.cut_by: int | None = None

    def hear(self, number: int) -> Literal["stop", "repeat", "cut"]:
        """What signal `number` asks for: the first an end in order, a second one at once."""
        now = self._now()
        if self._first is None:
            self._first, self._first_at = number, now
            return "stop"
        if number == self._first and now - self._first_at < REPEAT_S:
            return "repeat"
        self.cut_by = self.cut_by or number
        return "cut"
