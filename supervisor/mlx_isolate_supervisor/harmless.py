"""Text that somebody else wrote, as one line that does a terminal no harm; pure.

A model's library, a client or another server decides what such text holds: colours, moves of the
cursor, a new title for the window, marks that turn the direction of writing.
"""

import re

# Colours and moves of the cursor are dropped whole; titles and links (OSC) likewise.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)")
# What is left is shown as the escape that it would be in a Python string: controls but the tab,
# ends of lines and paragraphs, marks of direction, halves of surrogate pairs.
_HARMFUL = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def harmless(text: str) -> str:
    """`text` without terminal sequences, and with what else could do harm made visible."""
    if text.isprintable():
        return text
    text = _SEQUENCE.sub("", text)
    return _HARMFUL.sub(lambda found: ascii(found[0])[1:-1], text)


def harmless_output(line: str) -> str:
    """One line of a program's output: of what it wrote over itself (a progress bar) the last."""
    return harmless(line.rstrip("\r").rpartition("\r")[2])
