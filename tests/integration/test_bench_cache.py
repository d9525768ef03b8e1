"""The cache benchmark at its small size: it runs, and measures the tier that it says."""

from bench.bench_cache import SMALL, run, table
from bench.bench_cache_overhead import run as run_overhead
from bench.bench_cache_start import run as run_start


def test_the_small_size_runs_every_leg() -> None:
    results = run(SMALL, tokens=300, runs=2)
    assert results["entries_found_at_start"] == 1
    assert results["flush_evidence"]["durable"] is True
    assert results["auto_chose"] in ("restore_cheaper", "prefill_cheaper")
    off, on = table(results).splitlines()[1:]
    assert (off.split()[0], off.split()[-1]) == ("off", "0")
    assert (on.split()[0], on.split()[-1]) == ("on", "1")
    for leg in (
        "cold_s",
        "off_cold_s",
        "off_warm_s",
        "off_restart_s",
        "ram_hit_s",
        "ssd_hit_s",
        "restart_s",
        "mlx_lm_load_s",
        "plain_read_s",
    ):
        assert results[leg] > 0


def test_the_overhead_bench_runs_both_engines() -> None:
    results = run_overhead(SMALL, pairs=2, tokens=20)
    assert results["on_over_off_median"] > 0
    assert results["flush_over_on_median"] > 0
    assert results["flush"]["durable"] is True
    assert results["flush"]["entries"] >= 2


def test_the_start_bench_reads_every_header() -> None:
    results = run_start(20, tokens=300, runs=1)
    assert results["files"] == 20
    for leg in ("start_s", "plain_read_s", "look_s", "look_after_a_write_s", "make_room_s"):
        assert results[leg] > 0
