"""Whether to restore a prefix from disk or to run it through the model again; pure."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Mode = Literal["auto", "always", "never"]
MODES: tuple[Mode, ...] = ("auto", "always", "never")
# What a running rate forgets of its past with every measurement.
_FORGOTTEN = 0.3
# What a disk is taken to give until one restore has been measured: a plain NVMe drive.
ASSUMED_RESTORE_BYTES_PER_S = 1e9
# After so many refusals in a row one restore is tried, or a rate measured on a cold disk at the
# start would decide for ever.
REFUSALS_MAX = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen and a stable word for why."""

    restore: bool
    reason: Literal[
        "never", "always", "no_rates_yet", "restore_cheaper", "prefill_cheaper", "retry"
    ]


class _Rate:
    """Amount by time of the newest measurements, each counting by its size.

    A mean of rates would let a prompt of ten tokens, whose time is all overhead, speak as loudly
    as one of ten thousand.
    """

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def note(self, amount: int, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._amount += amount - _FORGOTTEN * self._amount
            self._seconds += seconds - _FORGOTTEN * self._seconds

    @property
    def per_s(self) -> float | None:
        return self._amount / self._seconds if self._seconds else None


class RestoreChoice:
    """Running rates of both ways, and the choice between them.

    Attributes:
        made: choices so far, by their reason.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self._restored = _Rate()
        self._prefilled = _Rate()
        self._refusals = 0
        self.made: Counter[str] = Counter()

    @property
    def restore_bytes_per_s(self) -> float | None:
        """As measured lately; None before the first."""
        return self._restored.per_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """As measured lately; None before the first."""
        return self._prefilled.per_s

    def note_restore(self, size: int, seconds: float) -> None:
        """A restore of `size` bytes took so long."""
        self._restored.note(size, seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens ran through the model in so long."""
        self._prefilled.note(tokens, seconds)

    def choose(self, *, tokens_gained: int, size: int) -> Choice:
        """Restore `size` bytes, or run `tokens_gained` tokens through the model; counted in `made`."""
        choice = self._choose(tokens_gained, size)
        self.made[choice.reason] += 1
        return choice

    def _choose(self, tokens_gained: int, size: int) -> Choice:
        if self.mode != "auto":
            return Choice(restore=self.mode == "always", reason=self.mode)
        prefill_tokens_per_s = self.prefill_tokens_per_s
        if prefill_tokens_per_s is None:
            return Choice(restore=True, reason="no_rates_yet")
        bytes_per_s = self.restore_bytes_per_s or ASSUMED_RESTORE_BYTES_PER_S
        if size / bytes_per_s <= tokens_gained / prefill_tokens_per_s:
            self._refusals = 0
            return Choice(restore=True, reason="restore_cheaper")
        self._refusals += 1
        if self._refusals > REFUSALS_MAX:
            self._refusals = 0
            return Choice(restore=True, reason="retry")
        return Choice(restore=False, reason="prefill_cheaper")
