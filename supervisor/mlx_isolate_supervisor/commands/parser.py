"""argparse with errors of one sentence: what is wrong, the nearest flag, where the help is."""

import argparse
import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from mlx_isolate_supervisor import exit_codes


def whole_number(text: str) -> int:
    """A count as people type it.

    Raises:
        ArgumentTypeError: it is no whole number, or a negative one.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text} is no whole number of 0 or more")
    return int(text)


def some_seconds(text: str) -> float:
    """A time as people type it, at least a millisecond and at most a day.

    Raises:
        ArgumentTypeError: it is no such number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds from 0.001 to 86400")
    return seconds


class Parser(argparse.ArgumentParser):
    """A parser whose subparsers, each of this class too, judge their own unknown words."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's, except that nothing stays unknown."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0]
            near = get_close_matches(word.partition("=")[0], self._option_string_actions, n=1)
            hint = f", did you mean {near[0]}" if near else ""
            self.error(f"unknown argument {word}{hint}")
        return parsed, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, in fewer words: the nearest choice, or all of them where none is near."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = get_close_matches(str(value), choices, n=1)
        hint = f", did you mean {near[0]}" if near else f"; choose from {', '.join(choices)}"
        kind = str(action.metavar or action.dest).lower()
        raise argparse.ArgumentError(None, f"there is no {kind} {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """Say it on stderr and leave with USAGE."""
        self.exit(exit_codes.USAGE, f"mlx-isolate: {message}; see {self.prog} --help\n")
