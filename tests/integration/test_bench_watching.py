"""The watching benchmark at its small size, and what it must show at any size."""

from bench.bench_watching import SMALL, lines, run

# A page of Python objects more or less; what an unbounded buffer would take grows with the load.
MEMORY_NOISE_BYTES = 6_000_000


def test_every_reader_gets_every_event_and_memory_stays_flat() -> None:
    result = run(SMALL)
    assert result.delivered == [result.published] * SMALL.readers
    assert result.growth < MEMORY_NOISE_BYTES
    assert "ratio" in "\n".join(lines(result))
