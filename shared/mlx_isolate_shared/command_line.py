"""argparse with errors of one sentence: what is wrong, the nearest flag, where the help is."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

# What the exit status says of a command that was typed wrong.
USAGE = 2
# How alike a word must be to what is suggested for it; at difflib's own 0.6, `foo` is near `oom`.
_NEAR = 0.7
_MISSING = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """A parser whose subparsers, each of this class too, judge their own unknown words.

    Attributes:
        elsewhere: what other programs call one of its commands, with that command's name here.
    """

    elsewhere: Mapping[str, str] = {}

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's, except that nothing stays unknown."""
        words = sys.argv[1:] if args is None else args
        if self._subparsers is None and "-" in self.prefix_chars:
            # First, since a misspelt flag may also be one that is required.
            self._refuse_unknown_flags(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown[0])
        return parsed, []

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        for word in words:
            if word == "--":
                return
            flag = word.partition("=")[0]
            # A word with a space in it is a value to argparse, whatever it begins with.
            if (
                flag.startswith("--")
                and " " not in word
                and flag not in self._option_string_actions
            ):
                self._refuse(word)

    def _refuse(self, word: str) -> NoReturn:
        near = get_close_matches(word.partition("=")[0], self._option_string_actions, 1, _NEAR)
        hint = f", did you mean {near[0]}" if near else ""
        self.error(f"unknown argument {word}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, in fewer words: the nearest choice, or all of them where none is near."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        meant = self.elsewhere.get(str(value))
        near = [meant] if meant else get_close_matches(str(value), choices, 1, _NEAR)
        hint = f", did you mean {near[0]}" if near else f"; choose from {', '.join(choices)}"
        kind = str(action.metavar or action.dest).lower()
        raise argparse.ArgumentError(None, f"there is no {kind} {value!r}{hint}")

    def _verbs(self) -> str:
        """The words that one of is missing, where this command has such."""
        parsers = [action for action in self._actions if action.nargs == argparse.PARSER]
        words = [str(word) for action in parsers for word in action.choices or ()]
        return f": {', '.join(words)}" if words else ""

    def error(self, message: str) -> NoReturn:
        """Say it on stderr and leave with USAGE."""
        # argparse begins with the flag's name here, and with many words there.
        told = message.removeprefix("argument ")
        if told.startswith(_MISSING):
            told = f"give {told.removeprefix(_MISSING)}{self._verbs()}"
        self.exit(USAGE, f"mlx-isolate: {told}; see {self.prog} --help\n")
