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
    assert set(relay.cpu_us) == set(SMALL.rates)
    assert all(0 < value < 10_000 for values in relay.cpu_us.values() for value in values)
    assert all(0 < value <= 1.01 for value in relay.reads_per_event)
    assert len(result.rows) == table.count("\n") - len(result.machine) - 2
    assert len(result.pages_ms) > 10
