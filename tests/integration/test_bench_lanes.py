"""The benchmark of the two lanes runs and compares them."""

from pathlib import Path

from bench import bench_lanes


def test_small_size_compares_both_lanes(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    clock, cpu = bench_lanes.main(["--small", "--json", str(out)])
    assert clock.ratio is not None and clock.ratio > 0
    assert cpu.ratio is not None and cpu.ratio > 0
    assert out.stat().st_size > 0
