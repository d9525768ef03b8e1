"""What holds for all models together: how many, how much memory, which beside which."""

import msgspec

from mlx_isolate_supervisor.config import GroupSpec, MemoryPolicy, ServeSettings
from mlx_isolate_supervisor.engines import memory
from mlx_isolate_supervisor.settings.layers import MEMORY_BUDGET_SHARE


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all models together; may change while the daemon runs.

    Attributes:
        models_max: models loaded at a time; 0 = any number.
        budget_bytes: memory of all engines; None = unlimited.
        ceiling_bytes: what one model alone may need; see `eviction.Rules`.
        policy: whether an engine may load beside the one that it replaces.
        ttl_s: idle time after which a model without its own is unloaded; 0 = never.
    """

    models_max: int = 0
    budget_bytes: int | None = None
    ceiling_bytes: int | None = None
    policy: MemoryPolicy = "auto"
    ttl_s: float = 0.0
    groups: tuple[GroupSpec, ...] = ()


def pool_limits(settings: ServeSettings) -> PoolLimits:
    """The limits of all models together, from the daemon's settings.

    A budget that was asked for is kept to the byte; the default one is a guess, and one model alone
    may take more than it, up to the machine's memory.
    """
    physical = memory.physical_bytes()
    asked = settings.memory_budget_bytes
    return PoolLimits(
        models_max=settings.models_max,
        budget_bytes=int(physical * MEMORY_BUDGET_SHARE) if asked is None else asked,
        ceiling_bytes=physical if asked is None else asked,
        policy=settings.memory_policy,
        ttl_s=settings.ttl_s,
        groups=settings.groups,
    )
