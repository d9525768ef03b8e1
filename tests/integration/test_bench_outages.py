"""The bench of outages takes every figure of both servers."""

import json
from pathlib import Path

import pytest
from bench import bench_outages


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_small_size_takes_every_figure_of_both(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert bench_outages.main(["--small", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) == 14
    assert figures["requests that failed until then"]["theirs"] > 0
    assert figures["kill to serving, s"]["ours"] < figures["kill to serving, s"]["theirs"]
    assert all(one["ours"] > 0 < one["theirs"] for name, one in figures.items() if "MB" in name)
