"""The benches of growth, with prompts and with models, take every figure at every size."""

import json
from pathlib import Path

import pytest
from bench import bench_many_models, bench_prompt_length


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_small_prompts_are_timed_at_both_servers(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert bench_prompt_length.main(["--small", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    lengths = [int(tokens) for tokens in figures]
    wanted = bench_prompt_length.SMALL[2]
    assert all(abs(a - b) <= 8 for a, b in zip(lengths, wanted, strict=True)), lengths
    assert all(one["ours"] > 0 and one["theirs"] > 0 for one in figures.values())


def test_two_models_are_held_against_one(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert bench_many_models.main(["--small", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert list(figures) == ["1", "2"]
    assert all(value > 0 for one in figures.values() for value in one.values())
