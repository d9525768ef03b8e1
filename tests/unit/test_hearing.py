"""What an engine reports is believed within bounds only, whatever it is."""

import json
import random
from typing import Any

import msgspec
import pytest

from mlx_isolate_shared import wire
from mlx_isolate_shared.config import PIPE_LINE_BYTES_MAX
from mlx_isolate_supervisor.engines.hearing import COUNT_MAX, TEXT_CHARACTERS_MAX, hear
from mlx_isolate_supervisor.slots.watchdog import begin_service, counters_of, hear_progress
from mlx_isolate_supervisor.telemetry.metrics import ModelMetrics
from tests.material.report_lines import GOOD, random_line

FACTS = wire.ModelFacts(
    architecture="a",
    parameters=1,
    weights_bytes=1,
    dtype="f",
    context_length=1,
    vocab_size=1,
    backend="b",
)


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_a_true_report_is_taken_as_it_is(message: wire.Report) -> None:
    assert hear(wire.encode_line(message)) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b'{"type":"progress","active":-1}',
        b'{"type":"progress","active":true}',
        b'{"type":"progress","active":NaN}',
        b'{"type":"progress","active":%d}' % (COUNT_MAX + 1),
        b'{"type":"progress","active":' + b"9" * 4000 + b"}",
        b'{"type":"progress","cache":{"restore_ms":-1e308}}',
        b'{"type":"progress","cache":{"restore_ms":1e999}}',
        b'{"type":"progress","cache":{"miss_reasons":{"a":-1}}}',
        b'{"type":"loading","stage":7}',
        b'{"type":"loading","stage":"x","more":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"type":"ready","pid":1,"socket_path":"/","load_s":-1,"facts":{}}',
        b'{"type":"from_the_future"}',
    ],
    ids=lambda line: line[:40].decode(errors="replace"),
)
def test_what_is_no_report_is_nothing(line: bytes) -> None:
    assert hear(line) is None


def test_text_is_one_line_without_control_characters_and_bounded() -> None:
    nasty = "\x1b[2J\x00\n\u202e" + "x" * 100_000
    loading = hear(wire.encode_line(wire.Loading(stage=nasty, fraction=-1e308, detail=nasty)))
    assert isinstance(loading, wire.Loading)
    assert loading.stage.isprintable() and len(loading.stage) == 64
    assert loading.detail.isprintable() and len(loading.detail) == TEXT_CHARACTERS_MAX
    assert loading.fraction == 0.0
    failed = hear(wire.encode_line(wire.Failed(code=nasty, message=nasty)))
    assert isinstance(failed, wire.Failed)
    assert (failed.code + failed.message).isprintable()


def test_facts_and_reasons_are_bounded_too() -> None:
    facts = msgspec.structs.replace(FACTS, backend="\x1b" * 9999, warnings=("\n" * 9999,) * 99)
    ready = hear(wire.encode_line(wire.Ready(pid=1, socket_path="/s", load_s=0.1, facts=facts)))
    assert isinstance(ready, wire.Ready)
    assert len(msgspec.json.encode(ready)) < 100_000
    assert "\x1b" not in ready.facts.backend


# Counts by an engine's own words, whichever fields of the kind there will be.
TALLIES = [
    name
    for name in wire.CacheFigures.__struct_fields__
    if isinstance(getattr(wire.CacheFigures(), name), dict)
]


@pytest.mark.parametrize("tally", TALLIES)
def test_counts_by_an_engines_own_words_are_bounded(tally: str) -> None:
    def heard(counts: dict[str, int]) -> wire.Report | None:
        given = msgspec.structs.replace(wire.CacheFigures(), **{tally: counts})
        return hear(wire.encode_line(wire.Progress(cache=given)))

    assert heard({f"r{number}": 1 for number in range(1000)}) is None
    assert heard({"a": -1}) is None
    told = heard({"a\x1b": 1})
    assert isinstance(told, wire.Progress)
    assert getattr(told.cache, tally) == {"a\\x1b": 1}


def test_what_an_engine_says_of_its_cache_is_one_harmless_line() -> None:
    figures = wire.CacheFigures(ssd_trouble="full\n\x1b[2J" + "x" * 9999)
    told = hear(wire.encode_line(wire.Progress(cache=figures)))
    assert isinstance(told, wire.Progress)
    assert told.cache.ssd_trouble.isprintable()
    assert told.cache.ssd_trouble.startswith("full")
    assert len(told.cache.ssd_trouble) <= TEXT_CHARACTERS_MAX


def check(message: wire.Report) -> None:
    """Everything that becomes of a report must be possible with this one."""
    text = json.dumps(msgspec.to_builtins(message), allow_nan=False)
    assert len(text) <= 2 * PIPE_LINE_BYTES_MAX
    match message:
        case wire.Progress():
            assert min(counters_of(message)) >= 0
            hear_progress(begin_service(0.0), message, 1.0)
            ModelMetrics().fold(1, message)
            float(message.footprint_bytes - message.cache.ram_bytes)
        case wire.Loading():
            assert message.fraction is None or 0.0 <= message.fraction <= 1.0
        case _:
            pass


def fuzz(examples: int, seed: int) -> None:
    chance = random.Random(seed)
    heard: dict[Any, int] = {}
    for _ in range(examples):
        line = random_line(chance)
        message = hear(line)
        heard[type(message)] = heard.get(type(message), 0) + 1
        if message is not None:
            check(message)
    assert len(heard) == 5, "the generator makes reports of every kind, and nonsense"


def test_three_thousand_random_lines() -> None:
    fuzz(3000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_300000_random_lines() -> None:
    fuzz(300_000, seed=random.SystemRandom().randrange(2**32))
