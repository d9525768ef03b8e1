"""What the body of an engine's answer is handed to; no code."""

from collections.abc import Callable
from typing import Protocol


class BodySink(Protocol):
    """Where a body goes."""

    @property
    def writing_paused(self) -> bool:
        """Whether so much is waiting that the source should stop."""
        ...

    def begin(self, block: bytes, /) -> None:
        """Take what arrived with the head, which may be nothing; before anything else."""
        ...

    def write(self, block: bytes, /) -> None:
        """Take a block; must not block or raise."""
        ...

    async def drain(self, is_over: Callable[[], bool]) -> None:
        """Wait until writing is no longer paused, or `is_over`; raises if that takes too long."""
        ...
