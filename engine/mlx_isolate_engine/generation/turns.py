"""Whose turn it is where completions of several adapters wait for one model; pure.

A batch computes with one adapter at a time. Another one waits until the batch has drained, but
never longer than a turn: then the rows that generate are set aside, and have their next turn.
"""

from collections.abc import Mapping
from typing import Literal

# How long one adapter goes on while another waits. Shorter turns spend more on taking rows out of
# the batch and putting them back; longer ones stop a stream for longer.
TURN_S = 2.0

Adapter = str | None
Decision = Literal["go", "drain", "switch"]


class Turns:
    """Who is mounted, and since when.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, now: float) -> None:
        self.mounted: Adapter = None
        self._began = now

    def decide(
        self, waiting: Mapping[Adapter, float], now: float, *, is_running: bool
    ) -> tuple[Decision, Adapter]:
        """What to do now, and for `switch` whom to mount.

        Args:
            waiting: since when the first completion of each adapter waits, set-aside ones included.
            is_running: completions of the mounted adapter are in the batch.

        Returns:
            go: let completions of the mounted adapter in. drain: let nobody in, and set aside who
            generates. switch: the batch is empty, mount this one.
        """
        others = {adapter: since for adapter, since in waiting.items() if adapter != self.mounted}
        if not others:
            return "go", self.mounted
        first = min(others, key=lambda adapter: others[adapter])
        is_over = now - max(self._began, others[first]) >= TURN_S
        if is_running:
            return ("drain" if is_over else "go"), self.mounted
        if self.mounted in waiting and not is_over and waiting[self.mounted] <= others[first]:
            return "go", self.mounted
        self.mounted, self._began = first, now
        return "switch", first
