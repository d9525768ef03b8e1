"""Lengths that attention is shown where a device plans each one anew, and how to make them few.

On CUDA, MLX has cuDNN plan attention for each pair of a number of new tokens and a number of keys.
A plan takes 75 ms on an H200 host (mlx 0.32.4), whatever the model; without rounding, nearly every
prompt pays for one, and a tail of a few tokens pays five times for it what it costs to run. Metal
and the CPU plan nothing.
"""

from typing import Any

from mlx_isolate_engine.device import backend_name

# What MLX's CUDA backend calls thrashing is any process that has met twice as many shapes as its
# caches hold: from then on each new one is an error, which ends an engine.
NO_THRASHING_CHECK = ("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")

# New tokens: fewer are rounded up to these.
SMALLEST = 16
# Keys: beyond this they are rounded by so many, which few contexts notice in memory.
FINE_FROM = 4096
FINE_STEP = 1024
# More new tokens than this cost more beside a mask than a plan does.
MASKED_MAX = 512
# What mlx-lm's models call a table of positions (gpt2, gpt_bigcode).
_TABLE = "wpe"


def are_costly() -> bool:
    """Whether this process computes on a device that plans for each shape."""
    return backend_name() == "cuda"


def has_position_table(model: Any) -> bool:
    """Whether a model (mlx_lm's) looks positions up: nothing may run behind the last one."""
    modules: list[tuple[str, Any]] = getattr(model, "named_modules", list)()
    return any(name.rpartition(".")[2] == _TABLE for name, _ in modules)


def rounded_tokens(tokens: int) -> int:
    """New tokens that a pass runs for so many that are wanted: 4 sizes to each doubling."""
    step = max(SMALLEST, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def rounded_keys(tokens: int) -> int:
    """Keys that a pass is shown for so many that are held."""
    if tokens <= FINE_FROM:
        return rounded_tokens(tokens)
    return -(-tokens // FINE_STEP) * FINE_STEP
