"""Spelling of sizes, times and switches, as people type them."""

import math
import re

import msgspec

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?|%)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SWITCH = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


class Share(msgspec.Struct, frozen=True):
    """A part of something whose size is not known yet; `fraction` in 0..1."""

    fraction: float

    def of(self, total: int) -> int:
        """So many bytes of `total`."""
        return int(total * self.fraction)


def parse_size(text: str, bare_unit: int = 1) -> int | Share:
    """Bytes from `32GB`, `512MiB`, `1.5g`, a bare number, or a share from `20%`.

    Args:
        text: what a person wrote.
        bare_unit: bytes that a number without a unit counts in.

    Raises:
        ValueError: a sentence part saying which spellings exist.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size; write it as 32GB, 512MiB or 20%")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if number > 100:
            raise ValueError("is more than all of it; write at most 100%")
        return Share(number / 100)
    if not unit:
        return round(number * bare_unit)
    step = 1024.0 if "i" in unit else 1000.0
    return round(number * math.pow(step, _POWERS.get(unit[0], 0)))


def parse_time(text: str) -> float:
    """Seconds from `90`, `90s`, `5m`, `250ms`, `2h`.

    Raises:
        ValueError: a sentence part saying which spellings exist.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a time; write it as 90, 90s or 5m")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def parse_switch(text: str) -> bool:
    """A switch from `1`, `true`, `yes`, `on` and their opposites.

    Raises:
        ValueError: a sentence part saying which spellings exist.
    """
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ValueError("is neither on nor off; write true or false") from None


def parse_whole(text: str) -> int:
    """A whole number, zero or more.

    Raises:
        ValueError: a sentence part saying what is expected.
    """
    if not re.fullmatch(r"\d+", text.strip()):
        raise ValueError("is not a whole number, zero or more")
    return int(text)


def parse_number(text: str) -> float:
    """A finite number, zero or more.

    Raises:
        ValueError: a sentence part saying what is expected.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError("is not a number, zero or more")
    return number


def show_bytes(count: int) -> str:
    """A size for a person: `0 B`, `512 MB`, `1.2 GB` (powers of 1000)."""
    if count < 1000:
        return f"{count} B"
    number = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        number /= 1000
        if number < 999.5 or unit == "TB":
            break
    return f"{number:.1f} {unit}" if number < 9.95 else f"{number:.0f} {unit}"


def show_seconds(seconds: float) -> str:
    """A duration for a person: `0.3s`, `12s`, `5m 3s`, `2h 10m`, `3d 4h`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // small}{small_unit}"
    return f"{whole // 60}m {whole % 60}s" if whole >= 60 else f"{whole}s"
