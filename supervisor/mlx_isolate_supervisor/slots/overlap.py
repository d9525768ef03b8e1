"""Whether a new engine may load beside the one that it is to replace: pure."""

from collections.abc import Callable

import msgspec

from mlx_isolate_supervisor.config import MemoryPolicy

# Free memory that a successor needs, as a multiple of its predecessor's footprint: a load holds
# more for a moment than a loaded model.
OVERLAP_MARGIN = 1.25


class GpuRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's own memory, as the running engine last reported it; 0 where it did not."""

    held_bytes: int
    free_bytes: int


def has_room_for_two(
    policy: MemoryPolicy,
    *,
    fits_budget: Callable[[], bool],
    footprint: int | None,
    available: int | None,
    gpu: GpuRoom | None = None,
) -> bool:
    """The decision; `keep_then_commit` trusts the budget alone, `auto` looks at the system too.

    Args:
        fits_budget: whether both fit into the memory budget, beside all other models. Looks at the
            model's files, so it is asked only where that decides.
        footprint: bytes that the running engine holds, None if unknown.
        available: bytes that the system has free for another process, None if unknown.
        gpu: the same of the GPU's own memory; None where it has none.
    """
    if policy == "evict_first":
        return False
    if policy == "auto" and not _is_free(footprint, available, gpu):
        return False
    return fits_budget()


def _is_free(footprint: int | None, available: int | None, gpu: GpuRoom | None) -> bool:
    if gpu is not None and not 0 < gpu.held_bytes * OVERLAP_MARGIN <= gpu.free_bytes:
        return False
    if footprint is None or available is None:
        return False
    return footprint * OVERLAP_MARGIN <= available
