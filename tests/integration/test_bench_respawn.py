"""The respawn benchmark at its small size: real engines, and the standby is what a respawn uses."""

import pytest
from bench.bench_respawn import OVERHEAD_S_MAX, lines, run


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_real_respawn_uses_the_standby_and_adds_little_to_the_bare_load() -> None:
    report = run(kills=3)
    assert len(lines(report)) == 6
    with_one = report["results"]["standby"]
    assert with_one["over_s"]["p50"] <= OVERHEAD_S_MAX
    assert with_one["ready_s"]["p50"] < report["results"]["no standby"]["ready_s"]["p50"]
