"""Stop strings and markers are found however the text is cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_isolate_engine.generation.scan import Span, StateScanner, StopScanner, Transitions

LETTERS = st.text(alphabet="ab<>/", max_size=30)
PHRASES = st.lists(st.text(alphabet="ab<>/", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def read_char_by_char(text: str, phrases: list[str]) -> str:
    """The definition: stop at the first moment at which a phrase is complete."""
    for end in range(len(text) + 1):
        ended = [p for p in phrases if text[:end].endswith(p)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@given(LETTERS, PHRASES, st.lists(st.integers(0, 100), max_size=8))
def test_stop_strings_do_not_depend_on_the_cuts(
    text: str, phrases: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(phrases)
    out = "".join(scanner.feed(piece) for piece in pieces_of(text, cuts))
    if scanner.matched is None:
        out += scanner.flush()
    assert out == read_char_by_char(text, phrases)


@given(LETTERS, PHRASES, st.lists(st.integers(0, 100), max_size=8))
def test_no_part_of_a_stop_string_is_given_out_before_it_is_certain(
    text: str, phrases: list[str], cuts: list[int]
) -> None:
    scanner, out, seen = StopScanner(phrases), "", ""
    for piece in pieces_of(text, cuts):
        seen += piece
        out += scanner.feed(piece)
        if scanner.matched is not None:
            break
        rest = seen[len(out) :]
        assert seen.startswith(out)
        assert rest == "" or any(phrase.startswith(rest) for phrase in phrases)


def test_text_after_a_stop_string_is_dropped() -> None:
    scanner = StopScanner(["END"])
    assert scanner.feed("one ENDtwo") == "one "
    assert scanner.feed("three") == ""
    assert scanner.matched == "END"


def test_plain_text_is_passed_on_at_once() -> None:
    scanner = StopScanner(["\n\n"])
    assert [scanner.feed(piece) for piece in ("a", "b ", "c")] == ["a", "b ", "c"]


THINK: Transitions = {"normal": (("<b>", "reasoning"),), "reasoning": (("</b>", "normal"),)}


@given(LETTERS, st.lists(st.integers(0, 100), max_size=8))
def test_states_do_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    def read(pieces: list[str]) -> list[tuple[str, str]]:
        scanner = StateScanner(THINK, "normal")
        spans = [span for piece in pieces for span in scanner.feed(piece)] + scanner.flush()
        merged: list[tuple[str, str]] = []
        for span in spans:
            if merged and merged[-1][0] == span.state:
                merged[-1] = (span.state, merged[-1][1] + span.text)
            else:
                merged.append((span.state, span.text))
        return [part for part in merged if part[1]]

    assert read(pieces_of(text, cuts)) == read([text])


def test_markers_change_the_state_and_are_no_text() -> None:
    scanner = StateScanner(THINK, "normal")
    assert scanner.feed("x<b>y</") == [
        Span("normal", "x", "<b>", "reasoning"),
        Span("reasoning", "y", "", "reasoning"),
    ]
    assert scanner.feed("b>z") == [
        Span("reasoning", "", "</b>", "normal"),
        Span("normal", "z", "", "normal"),
    ]


def test_an_unfinished_marker_is_text_at_the_end() -> None:
    scanner = StateScanner(THINK, "reasoning")
    assert scanner.feed("y</b") == [Span("reasoning", "y", "", "reasoning")]
    assert scanner.flush() == [Span("reasoning", "</b", "", "reasoning")]


def test_an_empty_stop_string_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError):
        StopScanner([""])
