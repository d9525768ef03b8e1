"""Whether two engines of a model may live side by side."""

import pytest

from mlx_isolate_supervisor.config import MemoryPolicy
from mlx_isolate_supervisor.slots.overlap import GpuRoom, has_room_for_two

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("policy", "footprint", "available", "gpu", "room"),
    [
        ("keep_then_commit", 10 * GB, 1 * GB, None, True),
        ("evict_first", 1 * GB, 100 * GB, None, False),
        ("auto", 4 * GB, 5 * GB, None, True),
        ("auto", 4 * GB, 4.9 * GB, None, False),
        ("auto", None, 100 * GB, None, False),
        ("auto", 1 * GB, None, None, False),
        ("auto", 1 * GB, 100 * GB, GpuRoom(held_bytes=0, free_bytes=80 * GB), False),
        ("auto", 1 * GB, 100 * GB, GpuRoom(held_bytes=8 * GB, free_bytes=10 * GB), True),
        ("auto", 1 * GB, 100 * GB, GpuRoom(held_bytes=8 * GB, free_bytes=9 * GB), False),
        ("auto", 1 * GB, 1 * GB, GpuRoom(held_bytes=8 * GB, free_bytes=80 * GB), False),
        ("keep_then_commit", 1 * GB, 1 * GB, GpuRoom(held_bytes=8 * GB, free_bytes=1), True),
    ],
)
def test_the_decision(
    policy: MemoryPolicy,
    footprint: int | None,
    available: int | None,
    gpu: GpuRoom | None,
    room: bool,
) -> None:
    for fits in (True, False):
        asked: list[bool] = []

        def fits_budget(fits: bool = fits, asked: list[bool] = asked) -> bool:
            asked.append(fits)
            return fits

        found = has_room_for_two(
            policy, fits_budget=fits_budget, footprint=footprint, available=available, gpu=gpu
        )
        assert found is (room and fits)
        # It looks at the model's files: of a hundred models that are down that is not done in vain.
        assert bool(asked) is room
