"""Findings: what was looked at, how it is, and what to do about it; pure."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

# `ok`; `doubt`: it serves, but slower or more fragile than it could; `fault`: it would not
# serve, or not that model.
Level = Literal["ok", "doubt", "fault"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding.

    Attributes:
        area: what was looked at, e.g. `port`.
        text: how it is, one sentence.
        remedy: what to do, None where nothing is to be done.
    """

    area: str
    level: Level
    text: str
    remedy: str | None = None


def ok(area: str, text: str) -> Finding:
    """Nothing is to be done."""
    return Finding(area=area, level="ok", text=text)


def doubt(area: str, text: str, remedy: str) -> Finding:
    """It serves, but not as well as it could."""
    return Finding(area=area, level="doubt", text=text, remedy=remedy)


def fault(area: str, text: str, remedy: str) -> Finding:
    """It would not serve, or not that model."""
    return Finding(area=area, level="fault", text=text, remedy=remedy)


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """All findings for a person, then their sum."""
    for finding in findings:
        level = finding.level.upper() if finding.level == "fault" else finding.level
        yield f"{level:6} {finding.area:10} {finding.text}"
        if finding.remedy is not None:
            yield f"{'':18}remedy: {finding.remedy}"
    faults = sum(finding.level == "fault" for finding in findings)
    doubts = sum(finding.level == "doubt" for finding in findings)
    if faults:
        what = f"{_count(faults, 'fault')} would stop it, or a model, from serving"
        yield f"{what}; {_count(doubts, 'doubt')}"
    else:
        yield f"nothing would stop it from serving; {_count(doubts, 'doubt')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number or 'no'} {word}s"
