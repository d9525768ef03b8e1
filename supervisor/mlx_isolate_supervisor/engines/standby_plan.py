"""Which models spare engines get ready for, and which spare a model takes: pure."""

from collections.abc import Sequence

import msgspec

from mlx_isolate_supervisor.config import ModelSpec

# A spare that is bound to a model stays with it for at least so long: changing over costs a core
# the load of a tokenizer, and two models that take turns would make it change for ever.
REBIND_MIN_S = 60.0
# A spare that still prepares is taken only this soon after it was told to; later it may hang.
PREPARING_MAX_S = 10.0


class Demand(msgspec.Struct, frozen=True):
    """A model that is to be up; `busy` counts its requests, running and waiting."""

    spec: ModelSpec
    busy: int


class Spare(msgspec.Struct, frozen=True, kw_only=True):
    """One spare engine as the plan sees it.

    Attributes:
        spec: the model that it prepares or has prepared for; None = imports alone.
        environment: of its process, whole.
        told_at: when it was last told to prepare, monotonic seconds.
    """

    spec: ModelSpec | None
    environment: dict[str, str]
    is_prepared: bool
    told_at: float

    def fits(self, spec: ModelSpec, environment: dict[str, str], now: float) -> bool:
        """Whether an engine of `spec`, to run in `environment`, may be made of it."""
        if self.environment != environment:
            return False
        is_own = self.spec is not None and self.spec.id == spec.id
        if self.spec is not None and not is_own and self.spec.engine.trust_remote_code:
            # Code that came with another model may have run in it.
            return False
        if self.is_prepared:
            return True
        return (is_own or self.spec is None) and now - self.told_at <= PREPARING_MAX_S

    def may_change_over(self, now: float) -> bool:
        """Whether it may be bound to another model by now."""
        if not self.is_prepared:
            return False
        return self.spec is None or now - self.told_at >= REBIND_MIN_S


def choose(
    spares: Sequence[Spare], spec: ModelSpec, environment: dict[str, str], now: float
) -> int | None:
    """Index of the best spare for `spec`: its own, else one of nobody's, else any; None if none."""

    def worth(index: int) -> tuple[bool, bool, bool]:
        spare = spares[index]
        is_own = spare.spec is not None and spare.spec.id == spec.id
        return (is_own, spare.is_prepared, spare.spec is None)

    fitting = [i for i, spare in enumerate(spares) if spare.fits(spec, environment, now)]
    return max(fitting, key=worth, default=None)


def choose_targets(
    demands: Sequence[Demand], bound: Sequence[ModelSpec | None], count: int
) -> list[ModelSpec]:
    """The `count` busiest models; of equally busy ones those that are bound, then the first."""
    held = {spec.id for spec in bound if spec is not None}
    order = sorted(demands, key=lambda demand: (-demand.busy, demand.spec.id not in held))
    return [demand.spec for demand in order[:count]]


def assign(
    bound: Sequence[ModelSpec | None], targets: Sequence[ModelSpec]
) -> list[ModelSpec | None]:
    """What each spare should be bound to, changing as few as possible."""
    left = {spec.id: spec for spec in targets}
    kept = [left.pop(spec.id, None) if spec is not None else None for spec in bound]
    free = list(left.values())
    return [mine or (free.pop(0) if free else old) for mine, old in zip(kept, bound, strict=True)]
