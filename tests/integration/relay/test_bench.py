"""The relay's bench runs, small, so that it cannot rot; its bounds are judged by hand."""

import os

import pytest
from bench.bench_relay import run
from bench.relay_report import SMALL, show


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="CPU time is read from /proc")
def test_the_bench_measures_every_figure_of_its_table() -> None:
    result = run(SMALL)
    table = show(result)
    assert {"direct", "relay"} <= set(result.readings)
    relay = result.readings["relay"]
    assert all(0 < value < 10_000 for value in [*relay.cpu_one_us, *relay.cpu_many_us])
    assert all(0 < value <= 1.01 for value in relay.reads_per_event)
    assert len(result.rows) == table.count("\n") - 9 and len(result.pages_ms) > 10
