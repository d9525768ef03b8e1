"""Three minutes of the soak: mixed traffic, a death every 20 s, and every promise kept.

The whole hour is `python -m bench.soak`. Cut in parts, so that tests which hold a figure to a bound
find their turn between them; the daemon is at rest then.
"""

from collections.abc import Iterator

import pytest
from bench.soak import Soak
from bench.soak_plan import make_plan
from bench.soak_record import faults, lines

PARTS, PART_S = 6, 30.0
# A seed whose three minutes hold every kind of request and of death.
PLAN = make_plan(
    seed=66, duration_s=PARTS * PART_S, request_every_s=1.8, kill_every_s=20, reload_every_s=60
)


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    with Soak(PLAN, tmp_path_factory.mktemp("soak")) as running:
        yield running


@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_of_it_runs_and_comes_to_rest(soak: Soak, part: int) -> None:
    soak.play(part * PART_S, (part + 1) * PART_S)


def test_every_promise_was_kept_all_the_while(soak: Soak) -> None:
    record = soak.finish()
    print("\n".join(lines(record)))
    assert faults(record) == []
    # It was worth it: there were deaths, and requests that noticed none of them.
    assert sum(record.restarts.values()) >= 3
    assert sum(one.ending == "right" for one in record.outcomes) >= 40
