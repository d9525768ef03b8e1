"""What the text of one flag means: from text to value, or a ValueError that says what is wrong.

Quantities, switches and times are read in `quantities`.
"""

from collections.abc import Callable

import msgspec

from mlx_isolate_supervisor.settings.quantities import parse_number, parse_size, parse_whole

GB = 1_000_000_000


def gigabytes(text: str) -> object:
    """A size in bytes; a bare number is of gigabytes."""
    return parse_size(text, GB)


def text(text: str) -> str:
    """Any text but an empty one."""
    if not text:
        raise ValueError("is empty")
    return text


def any_text(text: str) -> str:
    """Any text."""
    return text


def port(text: str) -> int:
    """A TCP port; 0 = any free one."""
    port = parse_whole(text)
    if port > 65535:
        raise ValueError("is not a port; ports end at 65535")
    return port


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = parse_whole(text)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    number = parse_number(text)
    if number > 1:
        raise ValueError("must lie between 0 and 1")
    return number


def temperature(text: str) -> float:
    """A sampling temperature, 0 to 2."""
    number = parse_number(text)
    if number > 2:
        raise ValueError("must lie between 0 and 2")
    return number


def json_object(text: str) -> object:
    """A JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:
        message = "is not a JSON object, such as '{\"enable_thinking\": false}'"
        raise ValueError(message) from None


def json_names(text: str) -> object:
    """A JSON object of names and folders."""
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError:
        message = 'is not a JSON object of names and folders, such as \'{"polite": "/lora"}\''
        raise ValueError(message) from None


def choice(*choices: str) -> Callable[[str], str]:
    """One of `choices`, in any case; given out as it stands there."""
    by_folded = {choice.lower(): choice for choice in choices}

    def parse(text: str) -> str:
        try:
            return by_folded[text.lower()]
        except KeyError:
            raise ValueError(f"is not one of {', '.join(choices)}") from None

    return parse


def kv_bits(text: str) -> int:
    """A number of bits that MLX quantizes to."""
    number = parse_whole(text)
    if number not in (2, 3, 4, 5, 6, 8):
        raise ValueError("must be one of 2, 3, 4, 5, 6, 8")
    return number
