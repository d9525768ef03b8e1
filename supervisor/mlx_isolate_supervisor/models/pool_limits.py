"""What holds for all models together: how many, how much memory, which beside which."""

from collections.abc import Mapping

import msgspec

from mlx_isolate_supervisor.config import GroupSpec, MemoryPolicy, ServeSettings
from mlx_isolate_supervisor.engines import memory
from mlx_isolate_supervisor.models.devices import Device
from mlx_isolate_supervisor.models.room import GpuLimits
from mlx_isolate_supervisor.settings.layers import MEMORY_BUDGET_SHARE

# Nothing else needs much of a GPU's own memory; the rest is for what MLX does not count.
GPU_BUDGET_SHARE = 0.9


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all models together; may change while the daemon runs.

    Attributes:
        models_max: models loaded at a time; 0 = any number.
        budget_bytes: memory of all engines; None = unlimited.
        ceiling_bytes: what one model alone may need; see `room.Rules`.
        policy: whether an engine may load beside the one that it replaces.
        is_default: nobody has asked for that budget.
        gpus: what the engines on each GPU with memory of its own may take of it, where it is known.
        ttl_s: idle time after which a model without its own is unloaded; 0 = never.
    """

    models_max: int = 0
    budget_bytes: int | None = None
    ceiling_bytes: int | None = None
    is_default: bool = False
    gpus: Mapping[str, GpuLimits] = {}
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
        is_default=asked is None,
        policy=settings.memory_policy,
        ttl_s=settings.ttl_s,
        groups=settings.groups,
    )


def with_devices(limits: PoolLimits, devices: Mapping[str, Device]) -> PoolLimits:
    """The same, with what is known of the GPUs.

    Where a GPU uses the machine's memory, a default budget is a share of what it may use of it.
    """
    usable = [one.memory_bytes for one in devices.values() if not one.has_own_memory]
    if limits.is_default and limits.ceiling_bytes is not None and usable:
        ceiling = min(limits.ceiling_bytes, *usable)
        budget = int(ceiling * MEMORY_BUDGET_SHARE)
        limits = msgspec.structs.replace(limits, budget_bytes=budget, ceiling_bytes=ceiling)
    gpus = {
        gpu: GpuLimits(
            budget_bytes=int(one.memory_bytes * GPU_BUDGET_SHARE), ceiling_bytes=one.memory_bytes
        )
        for gpu, one in devices.items()
        if one.has_own_memory
    }
    return msgspec.structs.replace(limits, gpus=gpus)
