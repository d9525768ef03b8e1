"""The record of one drill: its timeline, its figures, and a verdict for each promise; pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mlx_isolate_supervisor.drills.bounds import PROMISES

Result = Literal["kept", "broken", "not_run"]
Fact = float | int | str | None


class CannotRun(Exception):
    """The drill cannot be done here; the message says why, in one sentence."""


class Broken(Exception):
    """What the drill waited for did not come: the rest of it makes no sense.

    Args:
        promise: which promise that breaks.
        detail: what was awaited.
    """

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(detail)
        self.promise = promise
        self.detail = detail


def reason_of(error: Exception) -> str:
    """What an error says, or what it is where it says nothing."""
    return str(error) or type(error).__name__


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a timeline; `at_s` counts from the drill's act, None where time means nothing."""

    at_s: float | None
    text: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one promise was kept; `measured` and `limit` in the unit of the promise."""

    promise: str
    kept: bool
    measured: float | None = None
    limit: float | None = None
    detail: str = ""


class DrillReport(msgspec.Struct, frozen=True, kw_only=True):
    """One drill, done once.

    Attributes:
        number: which repetition, from 1.
        daemon: the address of the daemon it was done to.
        is_own: whether that was a throw-away one.
        reason: why it was not run, None if it was.
        facts: figures by name; times in seconds from the act.
    """

    drill: str
    number: int
    result: Result
    daemon: str | None = None
    is_own: bool = False
    reason: str | None = None
    facts: dict[str, Fact] = {}
    timeline: tuple[Mark, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


class Record:
    """Gathers what happens in one drill.

    Args:
        drill: its name.
        number: which repetition.
    """

    def __init__(self, drill: str, number: int) -> None:
        self._drill = drill
        self._number = number
        self._marks: list[Mark] = []
        self._verdicts: list[Verdict] = []
        self.facts: dict[str, Fact] = {}
        self.daemon: str | None = None
        self.is_own = False

    def mark(self, at_s: float | None, text: str) -> None:
        """Add a line to the timeline."""
        self._marks.append(
            Mark(at_s=None if at_s is None else round(at_s, 4), text=text),
        )

    def within(self, promise: str, measured: float, detail: str = "") -> None:
        """Judge a promise with a bound by what was measured."""
        limit = PROMISES[promise].limit
        assert limit is not None, f"{promise} has no bound"
        verdict = Verdict(
            promise=promise,
            kept=measured <= limit,
            measured=round(measured, 4),
            limit=limit,
            detail=detail,
        )
        self._verdicts.append(verdict)

    def that(self, promise: str, kept: bool, detail: str = "") -> None:
        """Judge a promise that is kept or not."""
        assert PROMISES[promise].limit is None, f"{promise} has a bound"
        self._verdicts.append(Verdict(promise=promise, kept=kept, detail=detail))

    def broken(self, error: Broken) -> None:
        """What was awaited did not come."""
        limit = PROMISES[error.promise].limit
        self._verdicts.append(
            Verdict(promise=error.promise, kept=False, limit=limit, detail=error.detail)
        )

    @property
    def is_kept(self) -> bool:
        """Whether no promise has been broken so far."""
        return all(verdict.kept for verdict in self._verdicts)

    def report(self, reason: str | None = None) -> DrillReport:
        """The whole record; with `reason` it was not run."""
        result: Result = "not_run" if reason else "kept" if self.is_kept else "broken"
        return DrillReport(
            drill=self._drill,
            number=self._number,
            result=result,
            daemon=self.daemon,
            is_own=self.is_own,
            reason=reason,
            facts=dict(self.facts),
            timeline=tuple(sorted(self._marks, key=_place)),
            verdicts=tuple(self._verdicts),
        )


def _place(mark: Mark) -> float:
    return float("inf") if mark.at_s is None else mark.at_s


def overall(reports: Sequence[DrillReport]) -> Result:
    """Broken if any was, else not run if any was not."""
    results = {report.result for report in reports}
    if "broken" in results:
        return "broken"
    return "not_run" if "not_run" in results else "kept"
