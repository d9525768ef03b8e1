"""Tables and colours of the client commands; pure."""

import os
import sys
from collections.abc import Collection, Sequence

_COLOURS = {
    "ready": "32",
    "starting": "33",
    "draining": "33",
    "stopping": "33",
    "backoff": "33",
    "failed": "31",
    "stopped": "2",
}


def use_colours() -> bool:
    """Whether stdout is a terminal whose user has not asked for plain text (NO_COLOR)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint_states(text: str, colours: bool) -> str:
    """Colour a line's first state word, which stands between spaces."""
    if not colours:
        return text
    for state, code in _COLOURS.items():
        if f" {state} " in text:
            return text.replace(f" {state} ", f" \x1b[{code}m{state}\x1b[0m ", 1)
    return text


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()
) -> list[str]:
    """Lines with columns two spaces apart; the columns named in `numbers` to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines: list[str] = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
