"""Texts as lines of a log: nothing lost, nothing that ends a line, nothing without a bound."""

import json

from hypothesis import given
from hypothesis import strategies as st

from mlx_isolate_engine.completion.text_log import split_lines


@given(st.text(), st.integers(min_value=14, max_value=60))
def test_lines_hold_the_whole_text_and_are_short_printable_ascii(text: str, limit: int) -> None:
    lines = split_lines(text, limit)
    assert "".join(json.loads(line) for line in lines) == text
    assert all(len(line) <= limit and line.isascii() and line.isprintable() for line in lines)
