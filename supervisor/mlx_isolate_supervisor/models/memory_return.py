"""Memory of an engine that has ended: the next load waits until the system really has it back."""

import logging
from collections.abc import Callable

import msgspec

from mlx_isolate_supervisor.telemetry.logs import log_event

# An engine below this size gives its memory back too fast for anybody to wait for.
RETURN_BYTES_MIN = 1_000_000_000
# How much of what an engine held must be free again before the next one loads, for how long that
# is waited for. Wired memory of a killed process may stay leaked on macOS until a reboot.
RETURN_SHARE = 0.8
RETURN_LIMIT_S = 15.0


class _Debt(msgspec.Struct, frozen=True):
    """Memory that has to come back: whose, until when, and at which mark."""

    model: str
    mark_bytes: int
    give_up_s: float


class MemoryReturn:
    """What the last engine to end may still owe.

    Args:
        now: monotonic seconds.
        available_bytes: memory that is free for another engine; None if unknown.
    """

    def __init__(self, now: Callable[[], float], available_bytes: Callable[[], int | None]) -> None:
        self._now = now
        self._available_bytes = available_bytes
        self._debt: _Debt | None = None

    def note_gone(self, model: str, held_bytes: int, available_before: int | None) -> None:
        """An engine is reaped: the next load waits until its memory has come back.

        Args:
            held_bytes: what it held at last.
            available_before: what was free while it lived; None if unknown.
        """
        if held_bytes < RETURN_BYTES_MIN or available_before is None:
            return
        mark = available_before + int(held_bytes * RETURN_SHARE)
        self._debt = _Debt(model, mark, self._now() + RETURN_LIMIT_S)

    def look(self) -> None:
        """Forget what is seen to have come back: who takes it next owes nothing to the one after."""
        if self._debt is not None and (self._available_bytes() or 0) >= self._debt.mark_bytes:
            self._debt = None

    def is_owed(self, needed_bytes: int) -> bool:
        """Whether a load of so much has to wait for what an engine that has ended held."""
        self.look()
        debt = self._debt
        return debt is not None and self._now() < debt.give_up_s and self._lacks(debt, needed_bytes)

    def debtor(self, needed_bytes: int) -> str | None:
        """The model whose engine's memory a load that waits has to wait for; None: it need not."""
        debt = self._debt
        if debt is None:
            return None
        if self.is_owed(needed_bytes):
            return debt.model
        if self._lacks(debt, needed_bytes):
            log_event(
                "memory.not_returned",
                logging.WARNING,
                model=debt.model,
                available_bytes=self._available_bytes(),
                expected_bytes=debt.mark_bytes,
                waited_s=RETURN_LIMIT_S,
            )
        self._debt = None
        return None

    def _lacks(self, debt: _Debt, needed_bytes: int) -> bool:
        available = self._available_bytes()
        return available is not None and available < min(debt.mark_bytes, 2 * needed_bytes)
