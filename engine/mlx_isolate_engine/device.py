"""Memory of the GPU that MLX computes on: how much there is, and how much is free."""

from collections.abc import Mapping
from typing import Any


def backend_name() -> str:
    """`metal`, `cuda` or `cpu`: what MLX computes on by default."""
    import mlx.core as mx

    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def memory_bytes() -> int:
    """What models may use of it: Metal's working set, or all of CUDA's; 0 without a GPU."""
    import mlx.core as mx

    backend = backend_name()
    return 0 if backend == "cpu" else total_of(backend, mx.device_info())


def own_free_bytes() -> int:
    """What is free of a GPU with memory of its own, for any process; 0 on every other device."""
    import mlx.core as mx

    return free_of(mx.device_info()) if backend_name() == "cuda" else 0


def usable_bytes() -> int | None:
    """What this process may still take of the GPU; None without one, or where it does not say."""
    import mlx.core as mx

    match backend_name():
        case "cpu":
            return None
        case "cuda":
            # What MLX keeps for its next arrays is this process's to use.
            return free_of(mx.device_info()) + mx.get_cache_memory() or None
        case _:
            total = memory_bytes()
            return max(0, total - mx.get_active_memory()) if total else None


def total_of(backend: str, info: Mapping[str, Any]) -> int:
    """The same from MLX's description of the device, whose keys differ by backend."""
    keys = ["total_memory"]
    if backend == "metal":
        keys = ["max_recommended_working_set_size", "memory_size"]
    return next((int(info[key]) for key in keys if info.get(key)), 0)


def free_of(info: Mapping[str, Any]) -> int:
    """Free memory of a CUDA device from MLX's description of it; 0 where it does not say."""
    return int(info.get("free_memory") or 0)
