"""The hour under watch at its small size, and what it must show at any size."""

from bench.bench_watched_hour import SMALL, lines, run


def test_every_reader_has_every_event_after_kills_and_hang_ups() -> None:
    result = run(SMALL)
    assert set(result.behind) == {0}
    counts = result.counts
    assert counts.answered > 0 and counts.left > 0 and counts.refused > 0
    assert counts.kills >= 1 and counts.broken >= counts.kills
    assert counts.reconnects == counts.gaps == 0
    assert counts.errors == {}
    assert len(result.samples) >= 4
    assert any("slope" in line for line in lines(result))
