"""The start benchmark at its small size, so that it cannot rot."""

from bench.bench_start import IDLE_BYTES_MAX, lines, run


def test_the_start_benchmark_runs_and_the_idle_supervisor_is_small() -> None:
    report = run(starts=1)
    assert len(lines(report)) == 6
    assert report["results"]["mlx-isolate"]["idle_bytes"]["p50"] <= IDLE_BYTES_MAX
