"""Finding phrases in text that arrives in pieces, with the same result however it is cut."""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Where phrase number `phrase` lies in a buffer, as [start, end)."""

    start: int
    end: int
    phrase: int


def find_first(text: str, phrases: Sequence[str], begin: int = 0) -> Match | None:
    """The phrase that is complete first when `text` is read from `begin` char by char.

    Of two that end together the longer one wins, so that nothing of it is left over.
    """
    best: Match | None = None
    for number, phrase in enumerate(phrases):
        start = text.find(phrase, begin)
        if start < 0:
            continue
        end = start + len(phrase)
        if best is None or (end, start) < (best.end, best.start):
            best = Match(start, end, number)
    return best


def count_held(text: str, phrases: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a phrase."""
    if not text:
        return 0
    longest = max(map(len, phrases), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(phrase.startswith(tail) for phrase in phrases):
            return size
    return 0


class StopScanner:
    """Passes text on until one of the stop strings is complete; nothing of it is passed on.

    Args:
        phrases: the stop strings, none of them empty.
    """

    def __init__(self, phrases: Sequence[str]) -> None:
        assert all(phrases), "an empty stop string would match everywhere"
        self._phrases = tuple(phrases)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is known not to belong to a stop string, after `text` has arrived."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        match = find_first(buffer, self._phrases)
        if match is not None:
            self.matched = self._phrases[match.phrase]
            self._held = ""
            return buffer[: match.start]
        held = count_held(buffer, self._phrases)
        self._held = buffer[len(buffer) - held :] if held else ""
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """What was held back, at an end without a stop string."""
        held, self._held = self._held, ""
        return held


class Span(NamedTuple):
    """Text of one state; `marker` is what ended it, "" if it may go on; `after` the next state."""

    state: str
    text: str
    marker: str
    after: str


Transitions = dict[str, tuple[tuple[str, str], ...]]


class StateScanner:
    """Cuts text at markers that change its meaning (reasoning, tool calls), without the markers.

    Args:
        transitions: state -> ((marker, next state), ...).
        initial: the state before the first character.
    """

    def __init__(self, transitions: Transitions, initial: str) -> None:
        self._edges = transitions
        self._markers = {s: tuple(m for m, _ in edges) for s, edges in transitions.items()}
        self._held = ""
        self.state = initial

    def feed(self, text: str) -> list[Span]:
        """Spans that are certain after `text` has arrived; empty ones only where a marker ends."""
        spans: list[Span] = []
        buffer = self._held + text
        begin = 0
        while (match := find_first(buffer, self._markers.get(self.state, ()), begin)) is not None:
            marker, following = self._edges[self.state][match.phrase]
            spans.append(Span(self.state, buffer[begin : match.start], marker, following))
            self.state = following
            begin = match.end
        rest = buffer[begin:]
        held = count_held(rest, self._markers.get(self.state, ()))
        self._held = rest[len(rest) - held :] if held else ""
        if len(rest) > held:
            spans.append(Span(self.state, rest[: len(rest) - held], "", self.state))
        return spans

    def flush(self) -> list[Span]:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return [Span(self.state, held, "", self.state)] if held else []
