"""Text of others in a terminal: nothing of it is obeyed, nothing of it breaks a line."""

import pytest

from mlx_isolate_supervisor.harmless import harmless, harmless_output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcode 漢字 🙂\ttab", "plain ünïcode 漢字 🙂\ttab"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b[2J\x1b[Hb", "ab"),
        ("\x1b]0;new title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[31", "\\x1b[31"),
        ("bell\x07 back\x08 del\x7f c1\x9b31m", "bell\\x07 back\\x08 del\\x7f c1\\x9b31m"),
        ("two\nlines\r\n", "two\\nlines\\r\\n"),
        ("evil\u202etxt.exe", "evil\\u202etxt.exe"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_a_terminal_is_given_nothing_to_obey(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_a_sequence_cannot_be_put_together_by_dropping_another() -> None:
    assert "\x1b" not in harmless("\x1b\x1b[0m[31m")


def test_a_long_line_costs_no_more_than_its_length() -> None:
    # A quadratic search would take minutes.
    assert harmless("\x1b]" * 50_000).startswith("\\x1b]")


def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    assert harmless_output("\r 10%|#   \r 90%|### \r") == " 90%|### "
