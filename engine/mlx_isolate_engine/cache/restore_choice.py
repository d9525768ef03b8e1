"""Whether to restore a prefix from disk or to run it through the model again; pure."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["auto", "always", "never"]
MODES: tuple[Mode, ...] = ("auto", "always", "never")
# Weight of the newest measurement in a running rate.
_NEWEST = 0.3
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


class RestoreChoice:
    """Running rates of both ways, and the choice between them."""

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self.restore_bytes_per_s: float | None = None
        self.prefill_tokens_per_s: float | None = None
        self._refusals = 0

    def note_restore(self, size: int, seconds: float) -> None:
        """A restore of `size` bytes took so long."""
        if size > 0 and seconds > 0:
            self.restore_bytes_per_s = _blend(self.restore_bytes_per_s, size / seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens ran through the model in so long."""
        if tokens > 0 and seconds > 0:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, tokens / seconds)

    def choose(self, *, tokens_gained: int, size: int) -> Choice:
        """Restore `size` bytes, or run `tokens_gained` tokens through the model."""
        if self.mode != "auto":
            return Choice(restore=self.mode == "always", reason=self.mode)
        if self.restore_bytes_per_s is None or self.prefill_tokens_per_s is None:
            return Choice(restore=True, reason="no_rates_yet")
        if size / self.restore_bytes_per_s <= tokens_gained / self.prefill_tokens_per_s:
            self._refusals = 0
            return Choice(restore=True, reason="restore_cheaper")
        self._refusals += 1
        if self._refusals > REFUSALS_MAX:
            self._refusals = 0
            return Choice(restore=True, reason="retry")
        return Choice(restore=False, reason="prefill_cheaper")


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
