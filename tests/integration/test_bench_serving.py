"""The serving benchmark runs and compares every figure at every load."""

import json
from pathlib import Path

import pytest
from bench import bench_serving
from bench.serving_load import Turn


@pytest.mark.timeout(400)
def test_small_size_compares_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert bench_serving.main(["--small", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    loads = len(bench_serving.SMALL.clients) * 2
    assert len(figures) == loads * len(Turn.__annotations__)
    assert all(one["ours"] > 0 and one["theirs"] > 0 and one["ratio"] > 0 for one in figures)
