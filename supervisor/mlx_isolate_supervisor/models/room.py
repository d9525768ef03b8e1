"""Room for models, as `eviction` is asked for it and decides about it: needs, limits, wishes, plans.

No code; what any of it leads to is decided in `eviction` and carried out by `residency`.
"""

from collections.abc import Mapping

import msgspec

from mlx_isolate_supervisor.config import GroupSpec


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that an engine takes.

    Attributes:
        bytes: of the machine's.
        gpu: which GPU it computes on, as its environment names it; empty = the first.
        gpu_bytes: of that GPU's own memory; 0 where it has none, or nothing is known of it.
    """

    bytes: int
    gpu: str = ""
    gpu_bytes: int = 0


class GpuLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What all engines on one GPU may take of its own memory; as in `Rules`."""

    budget_bytes: int
    ceiling_bytes: int


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all models together.

    Attributes:
        budget_bytes: memory for all engines; None = unlimited.
        ceiling_bytes: a model that needs more than the budget may still be loaded alone if it
            needs no more than this; equal to the budget where that was asked for by the operator.
        gpus: the same for the own memory of each GPU that is known.
        models_max: models loaded at a time; 0 = any number.
        groups: models that must not be loaded together.
        may_overlap: where only the number of models is exceeded and the memory suffices for all, a
            model loads beside those that it replaces, which leave once it is ready.
    """

    budget_bytes: int | None = None
    ceiling_bytes: int | None = None
    gpus: Mapping[str, GpuLimits] = {}
    models_max: int = 0
    groups: tuple[GroupSpec, ...] = ()
    may_overlap: bool = False


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """One model that has been given room.

    Attributes:
        bytes: what its engines hold or are expected to, whichever is more.
        gpu, gpu_bytes: the same of a GPU's own memory; see `Need`.
        is_idle: nobody runs in it or waits for it (those who are held back do not count).
        is_held: requests wait for it that an earlier plan holds back.
        is_leaving: it is on its way down, or will be once the model that replaces it is ready.
        is_pinned: it makes room for nobody outside its group.
        is_lasting: a client asked that it be kept; it leaves after all others.
        used_s: when it was last busy, monotonic seconds.
        turn_s: when its turn began: who came before that is served before it leaves.
    """

    id: str
    bytes: int
    gpu: str = ""
    gpu_bytes: int = 0
    is_idle: bool
    is_held: bool = False
    is_leaving: bool = False
    is_pinned: bool = False
    is_lasting: bool = False
    used_s: float = 0.0
    turn_s: float = 0.0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """One model that somebody wants loaded.

    Attributes:
        need_bytes: what it will hold.
        gpu, gpu_bytes: the same of a GPU's own memory; see `Need`.
        since_s: since when the first of those who wait has waited, monotonic seconds.
        is_urgent: somebody waits for it; else (a preload) nothing leaves for it.
    """

    id: str
    need_bytes: int
    gpu: str = ""
    gpu_bytes: int = 0
    since_s: float
    is_urgent: bool = True

    @property
    def need(self) -> Need:
        """What it will hold."""
        return Need(bytes=self.need_bytes, gpu=self.gpu, gpu_bytes=self.gpu_bytes)


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What a model holds, for the figures of a refusal."""

    id: str
    bytes: int
    is_pinned: bool


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A model that cannot be loaded, whatever idle models leave.

    Attributes:
        is_of_gpu: it is the GPU's memory that lacks, and all figures are of that.
    """

    need_bytes: int
    budget_bytes: int | None
    models_max: int
    held: tuple[Holding, ...]
    is_of_gpu: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done now.

    Attributes:
        grants: may be loaded.
        evictions: idle models that leave now, each with the model that it leaves for (itself,
            where all together hold more than they may).
        holds: models that are to leave; a request that came after the given time waits.
        replaced: by model that is granted: those that leave once it is ready.
        refusals: wishes that can never come true as things are.
        dropped: wishes that were not urgent, and for which something would have to leave.
        waits: why each of the other wishes waits, a phrase.
        sheds_spares: spare engines are in the way.
        is_over: more is held than may be, and those that could leave are busy.
    """

    grants: tuple[str, ...] = ()
    evictions: dict[str, str] = {}
    holds: dict[str, float] = {}
    replaced: dict[str, tuple[str, ...]] = {}
    refusals: dict[str, Refusal] = {}
    dropped: tuple[str, ...] = ()
    waits: dict[str, str] = {}
    sheds_spares: bool = False
    is_over: bool = False
