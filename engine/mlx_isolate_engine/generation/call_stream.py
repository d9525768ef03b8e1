"""Finds tool calls in families that write their arguments as JSON, while they are being written.

Pure text: where a call's name and its arguments lie. Whether the whole is well formed is for the
family's parser to say, at the end.
"""

import re
from typing import Any, NamedTuple

# What a call begins with, up to the brace of its arguments, by the name of mlx-lm's parser.
_HEADERS = {
    "json_tools": re.compile(
        r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
    ),
    # Its newer models write the opening marker before each call, and no closing one.
    "mistral": re.compile(r"\s*(?:\[TOOL_CALLS\]\s*)?(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"),
}
# Families of which one block holds several calls, one after the other.
_REPEATING = frozenset({"mistral"})
# A call whose arguments have not begun by then is no call that can be followed; without a limit
# every further piece of text would be looked at from the start.
HEADER_CHARS_MAX = 1024
_TURN = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'["\\]')


class Piece(NamedTuple):
    """Arguments of call number `call` of a block; `name` comes with the first piece alone."""

    call: int
    name: str | None
    arguments: str


class CallStream:
    """Follows one tool block.

    Args:
        header: of the family.
        repeats: further calls may follow the first one.
    """

    def __init__(self, header: re.Pattern[str], *, repeats: bool) -> None:
        self._header = header
        self._repeats = repeats
        self._text = ""
        self._at = 0
        self._depth = 0
        self._is_in_string = False
        self.names: list[str] = []
        # Arguments of each call so far, as the model wrote them.
        self.arguments: list[str] = []

    @staticmethod
    def of(parser: Any, *, one_call: bool = False) -> "CallStream | None":
        """For a block of the family that mlx-lm's `parser` reads; None if it does not write JSON.

        Args:
            one_call: follow the first call of a block alone.
        """
        family = str(getattr(parser, "__module__", "")).rpartition(".")[2]
        header = _HEADERS.get(family)
        repeats = family in _REPEATING and not one_call
        return None if header is None else CallStream(header, repeats=repeats)

    @property
    def is_complete(self) -> bool:
        """Whether every call that has begun has all its arguments."""
        return self._depth == 0

    def feed(self, text: str) -> list[Piece]:
        """What is certain after `text` has arrived."""
        self._text += text
        pieces: list[Piece] = []
        while self._depth or self._begin(pieces):
            start = self._at
            self._scan()
            if self._at > start:
                part = self._text[start : self._at]
                self.arguments[-1] += part
                pieces.append(Piece(len(self.names) - 1, None, part))
            if self._depth:
                break
        return pieces

    def _begin(self, pieces: list[Piece]) -> bool:
        if self.names and not self._repeats:
            return False
        match = self._header.match(self._text, self._at, self._at + HEADER_CHARS_MAX)
        if match is None:
            return False
        self._at = match.end()
        self.names.append(match["name"])
        self.arguments.append("")
        pieces.append(Piece(len(self.names) - 1, match["name"], ""))
        return True

    def _scan(self) -> None:
        """Move to the end of the text, or behind the brace that closes the arguments."""
        text, at = self._text, self._at
        while True:
            match = (_IN_STRING if self._is_in_string else _TURN).search(text, at)
            if match is None:
                self._at = len(text)
                return
            at = match.end()
            mark = match[0]
            if mark == "\\":
                if at == len(text):  # what it escapes comes with the next text
                    self._at = at - 1
                    return
                at += 1
            elif mark == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    self._at = at
                    return
