"""Whether two engines of a model may live side by side."""

import pytest

from mlx_isolate_supervisor.config import MemoryPolicy
from mlx_isolate_supervisor.slots.overlap import has_room_for_two

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("policy", "footprint", "available", "backend", "room"),
    [
        ("keep_then_commit", 10 * GB, 1 * GB, "cpu", True),
        ("evict_first", 1 * GB, 100 * GB, "cpu", False),
        ("auto", 4 * GB, 5 * GB, "metal", True),
        ("auto", 4 * GB, 4.9 * GB, "metal", False),
        ("auto", None, 100 * GB, "cpu", False),
        ("auto", 1 * GB, None, "cpu", False),
        ("auto", 1 * GB, 100 * GB, "cuda12", False),
    ],
)
def test_the_decision(
    policy: MemoryPolicy, footprint: int | None, available: int | None, backend: str, room: bool
) -> None:
    found = has_room_for_two(
        policy, fits_budget=True, footprint=footprint, available=available, backend=backend
    )
    assert found is room
