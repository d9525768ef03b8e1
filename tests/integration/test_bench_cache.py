"""The cache benchmark at its small size: it runs, and measures the tier that it says."""

from bench.bench_cache import SMALL, run


def test_the_small_size_runs_every_leg() -> None:
    results = run(SMALL, tokens=300, runs=2)
    assert results["entries_found_at_start"] == 1
    assert results["flush_evidence"]["durable"] is True
    for leg in ("cold_s", "ram_hit_s", "ssd_hit_s", "restart_s", "mlx_lm_load_s", "plain_read_s"):
        assert results[leg] > 0
