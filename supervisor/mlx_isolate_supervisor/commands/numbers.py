"""Numbers as people type them on a command line."""

import argparse
import math


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
