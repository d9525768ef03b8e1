"""What the supervisor knows about itself and its models, as it is shown to the outside.

Plain snapshots: made from memory at any time, never waiting for an engine.
"""

from typing import Literal

import msgspec

from mlx_isolate_shared import wire
from mlx_isolate_shared.footprint import MemoryKind

Desired = Literal["up", "down"]
State = Literal["stopped", "starting", "ready", "draining", "stopping", "backoff", "failed"]
FailureCause = Literal["circuit_open", "cannot_work"]


class LastExit(msgspec.Struct, frozen=True, kw_only=True):
    """How an incarnation ended.

    Attributes:
        code: exit code, None if a signal ended it.
        signal: name of the signal, e.g. `SIGKILL`, None if it exited.
        reason: one sentence for a person: what the engine reported, or what was done to it.
        cause: the stable word that `restarts_by_cause` counts by.
        stderr_tail: its last lines of output, oldest first.
        at: seconds since the epoch.
    """

    incarnation: int
    code: int | None
    signal: str | None
    reason: str
    cause: str
    stderr_tail: tuple[str, ...]
    at: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a model is FAILED.

    Attributes:
        cause: `circuit_open` (a new try comes by itself) or `cannot_work` (it does not).
        code: stable word, e.g. `model_missing`.
        message: one sentence for a person; may hold paths.
        retry_in_s: time to the next try, None where none is due.
    """

    cause: FailureCause
    code: str
    message: str
    retry_in_s: float | None = None


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A new engine that loads beside the one that serves, or the last one that failed to.

    Attributes:
        loading: its last word, None if it said nothing yet.
        error: why it failed; None while it loads. The old engine serves on.
    """

    incarnation: int
    pid: int | None
    loading: wire.Loading | None = None
    error: str | None = None


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    Attributes:
        since: when `state` was entered, seconds since the epoch.
        restarts: respawns after an end that nobody asked for, since the supervisor's start.
        active: requests that hold a place in the engine, or still run in the one before it.
        queued: requests that wait in the supervisor.
        load_s: how long the running incarnation took from its spawn to ready.
        bare_load_s: what of that the engine itself spent on its load (with its imports, where it
            was no standby).
        memory_bytes: the engine process's memory; `memory_kind` says which measure.
        loading: the last word of a load, while STARTING.
        progress: the running engine's last counters.
        next_try_s: time to the respawn, while BACKOFF.
        replacement: the successor that a reload or a changed configuration started.
        pinned: it makes room for no model of another group, and its idle time is not limited.
        ttl_s: idle seconds after which it is unloaded; None = never.
        ttl_left_s: what is left of that; None unless it is ready.
        claimed_bytes: memory that it was given room for; None where it has none.
        gpu_bytes, claimed_gpu_bytes: what it holds and was given room for of a GPU's own memory.
        waits_for: why it is not loaded yet though somebody waits, a phrase ("until …", "for …").
    """

    id: str
    aliases: tuple[str, ...]
    desired: Desired
    state: State
    pid: int | None
    incarnation: int
    socket: str | None
    since: float
    restarts: int
    restarts_by_cause: dict[str, int]
    last_exit: LastExit | None
    active: int
    queued: int
    load_s: float | None
    memory_bytes: int | None
    memory_kind: MemoryKind | None
    facts: wire.ModelFacts | None
    loading: wire.Loading | None
    progress: wire.Progress | None
    failure: Failure | None
    next_try_s: float | None
    replacement: Replacement | None = None
    bare_load_s: float | None = None
    pinned: bool = False
    ttl_s: float | None = None
    ttl_left_s: float | None = None
    claimed_bytes: int | None = None
    gpu_bytes: int | None = None
    claimed_gpu_bytes: int | None = None
    waits_for: str | None = None


class StandbyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One spare engine process that waits for a model.

    Attributes:
        is_prepared: whether it has done ahead what it was told to.
        model: the model whose tokenizer it loads ahead; None = imports alone.
        since: when it was started, seconds since the epoch.
    """

    pid: int
    is_prepared: bool
    model: str | None
    memory_bytes: int | None
    memory_kind: MemoryKind | None
    since: float


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The own memory of one GPU.

    Attributes:
        name: as in CUDA_VISIBLE_DEVICES of the models on it; empty = the first.
        budget_bytes: what all engines on it may hold.
        claimed_bytes: what they hold or were given room for.
    """

    name: str
    budget_bytes: int
    claimed_bytes: int


class SupervisorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor process itself, its spare engines, and the room for all models.

    Attributes:
        time: of this snapshot, seconds since the epoch; what else is told as such is on this clock.
        memory_budget_bytes: memory that all engines may hold; None = unlimited.
        memory_claimed_bytes: what they hold or were given room for.
        models_max: models loaded at a time; 0 = any number.
        gpus: GPUs with memory of their own that are known.
    """

    pid: int
    version: str
    uptime_s: float
    memory_bytes: int
    memory_kind: MemoryKind
    run_dir: str
    time: float = 0.0
    standbys: tuple[StandbyStatus, ...] = ()
    memory_budget_bytes: int | None = None
    memory_claimed_bytes: int = 0
    models_max: int = 0
    gpus: tuple[GpuStatus, ...] = ()


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything /status shows, models in configured order."""

    supervisor: SupervisorStatus
    models: tuple[ModelStatus, ...]

    def model(self, name: str) -> ModelStatus | None:
        """The model that is called so, by id or alias."""
        return next((m for m in self.models if name in (m.id, *m.aliases)), None)


class Transition(msgspec.Struct, frozen=True, kw_only=True, tag="transition"):
    """One step of a model's lifecycle, for /events and the log.

    Attributes:
        before, after: states; equal where an event changed nothing that is shown.
        event: the lifecycle event that caused it.
        pid: of the engine it is about, None where there is none.
        reason: one sentence, may be empty.
        at: seconds since the epoch.
        is_planned: whether an engine has ended here that had been told to, for another one.
    """

    model: str
    incarnation: int
    pid: int | None = None
    before: State
    event: str
    after: State
    reason: str
    at: float
    is_planned: bool = False


class LoadStep(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """A load that moved, for /events and progress bars."""

    model: str
    incarnation: int
    loading: wire.Loading
    at: float


SlotEvent = Transition | LoadStep
