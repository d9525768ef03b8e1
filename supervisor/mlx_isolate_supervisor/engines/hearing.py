"""What the supervisor takes from an engine's report line: parsed, within bounds, printable; pure.

An engine runs a model library that may do anything to its memory, so its words are checked like a
stranger's: what they hold is kept, shown on terminals and encoded again.
"""

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from mlx_isolate_shared import wire
from mlx_isolate_supervisor.harmless import harmless

# No count of an engine comes near it, and every encoder and page can take it.
COUNT_MAX = (1 << 63) - 1
# Text for a person; longer ones are cut. A stage or a code is a word.
WORD_CHARACTERS_MAX = 64
TEXT_CHARACTERS_MAX = 2000
WARNINGS_MAX = 32
# Words by which an engine counts something; there are about ten of each kind.
REASONS_MAX = 64


def hear(line: bytes) -> wire.Report | None:
    """One report line; None if it cannot be one."""
    try:
        message = wire.decode_report(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    match message:
        case wire.Loading():
            return _loading(message)
        case wire.Failed():
            return wire.Failed(
                code=_text(message.code, WORD_CHARACTERS_MAX), message=_text(message.message)
            )
        case wire.Ready():
            facts = _facts(message.facts)
            is_right = facts is not None and message.load_s >= 0
            return msgspec.structs.replace(message, facts=facts) if is_right else None
        case wire.Progress():
            return _progress(message)


def _loading(message: wire.Loading) -> wire.Loading:
    fraction = message.fraction
    return wire.Loading(
        stage=_text(message.stage, WORD_CHARACTERS_MAX),
        fraction=None if fraction is None else min(1.0, max(0.0, fraction)),
        detail=_text(message.detail),
    )


def _facts(facts: wire.ModelFacts) -> wire.ModelFacts | None:
    if not _has_counts(facts):
        return None
    texts = {
        name: _text(value)
        for name in facts.__struct_fields__
        if isinstance(value := getattr(facts, name), str)
    }
    warnings = tuple(_text(warning) for warning in facts.warnings[:WARNINGS_MAX])
    return msgspec.structs.replace(facts, **texts, warnings=warnings)


def _progress(message: wire.Progress) -> wire.Progress | None:
    cache = message.cache
    if not (_has_counts(message) and _has_counts(cache)):
        return None
    cleaned: dict[str, dict[str, int] | str] = {}
    for name in cache.__struct_fields__:
        told: Any = getattr(cache, name)
        if isinstance(told, int | float):
            continue
        if isinstance(told, str):
            heard: dict[str, int] | str | None = _text(told)
        else:
            heard = _tally(cast(dict[str, int], told))
        if heard is None:
            return None
        if heard != told:
            cleaned[name] = heard
    if not cleaned:
        return message
    return msgspec.structs.replace(message, cache=msgspec.structs.replace(cache, **cleaned))


def _tally(counts: dict[str, int]) -> dict[str, int] | None:
    """Counts by an engine's own words; None if there are too many, or they are none."""
    if len(counts) > REASONS_MAX or not _are_counts(counts.values()):
        return None
    return {_text(name, WORD_CHARACTERS_MAX): count for name, count in counts.items()}


def _has_counts(message: msgspec.Struct) -> bool:
    """Whether every number in it can be a count, a size or a time."""
    values = (getattr(message, name) for name in message.__struct_fields__)
    return _are_counts(value for value in values if isinstance(value, int | float))


def _are_counts(values: Iterable[int | float]) -> bool:
    return all(0 <= value <= COUNT_MAX for value in values)


def _text(text: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """On one line, without what moves a terminal's cursor, and not too long."""
    return harmless(text[:characters_max])[:characters_max]
