"""All models of this supervisor: name or alias to slot, start of all, stop of all."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from mlx_isolate_shared.clock import Clock, SystemClock
from mlx_isolate_shared.errors import CapacityError, ConfigError, RequestError
from mlx_isolate_shared.wire import ModelFacts
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines import memory
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.engines.spawner import EngineSource, Spawner
from mlx_isolate_supervisor.engines.standby import SPARE_BYTES, Standbys, Surroundings
from mlx_isolate_supervisor.engines.standby_plan import Demand
from mlx_isolate_supervisor.models.devices import DeviceBook, gpu_of
from mlx_isolate_supervisor.models.footprints import FootprintBook, footprint_key
from mlx_isolate_supervisor.models.pool_limits import PoolLimits, with_devices
from mlx_isolate_supervisor.models.projection import need_of
from mlx_isolate_supervisor.models.residency import Residency
from mlx_isolate_supervisor.models.room import Need
from mlx_isolate_supervisor.settings.changes import ModelChanges, compare_models
from mlx_isolate_supervisor.slots.slot import Slot
from mlx_isolate_supervisor.slots.slot_context import SlotContext
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.logs import log_event
from mlx_isolate_supervisor.telemetry.status import (
    GpuStatus,
    ModelStatus,
    SlotEvent,
    StandbyStatus,
    Transition,
)

EventListener = Callable[[SlotEvent], None]
# Of a shutdown's time, what is kept for reaping the killed.
STOP_MARGIN_S = 0.5
# How long after its limit a stop may still wait for the kernel to give a killed process up.
REAP_LIMIT_S = 5.0
# What clients of mlx-lm's server call the model that it was started with.
MLX_LM_NAME = "default_model"


class Pool:
    """The slots, in configured order; implements `lease.Router`.

    To be made and used on the main thread's event loop: engines get their parent-death signal when
    the *thread* that spawned them ends.

    Args:
        models: at least one; ids and aliases unique over all of them.
        run_directory: acquired by the caller, who also releases it after `stop`.
        on_event: called on the loop for every transition and load step; must not block or raise.
        standby: spare engine processes; None = one where memory allows.
        limits: what holds for all models together; by default none but the policy of `settings`.
        footprints: what engines held in earlier runs; None = that is not kept.
        devices: GPUs that engines have reported; None = that is not kept.
        source: where engines come from; None = processes of this machine, made by `command`.
        available_bytes: memory that is free for another engine; None if unknown.

    Raises:
        ConfigError: two models with one name, or no model.
    """

    def __init__(
        self,
        models: Sequence[ModelSpec],
        *,
        command: EngineCommand,
        settings: SlotSettings,
        run_directory: RunDirectory,
        clock: Clock | None = None,
        on_event: EventListener | None = None,
        standby: int | None = 0,
        limits: PoolLimits | None = None,
        footprints: FootprintBook | None = None,
        devices: DeviceBook | None = None,
        source: EngineSource | None = None,
        available_bytes: Callable[[], int | None] = memory.available_bytes,
    ) -> None:
        clock = clock or SystemClock()
        self._footprints = footprints = footprints or FootprintBook(None)
        self._devices = devices or DeviceBook(None)
        self._limits = limits or PoolLimits(policy=settings.memory_policy)
        self._residency = Residency(
            with_devices(self._limits, self._devices.known),
            now=clock.monotonic,
            available_bytes=available_bytes,
        )
        self._on_event = on_event
        self._standbys = Standbys(
            command,
            settings.restart,
            run_directory,
            Surroundings(
                demands=self._demands,
                is_loading=lambda: any(slot.is_loading for slot in self._slots),
                has_room=lambda: self._residency.has_space(Need(bytes=SPARE_BYTES)),
                on_gone=lambda: self._residency.note_change(),
            ),
            standby,
        )
        self._context = SlotContext(
            settings=settings,
            source=source or Spawner(command, run_directory, self._standbys),
            residency=self._residency,
            need_of=self._need_of,
            note_facts=self._note_facts,
            footprints=footprints,
            clock=clock,
            on_event=self._tell,
            available_bytes=available_bytes,
        )
        self._slots = tuple(Slot(spec, self._context) for spec in models)
        self._by_name = _by_name(_names_of(self._slots))
        # Slots of models that are served no longer, until their engines are gone.
        self._leaving: dict[Slot, asyncio.Task[None]] = {}
        self._reloading: set[asyncio.Task[None]] = set()

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Ids in configured order."""
        return tuple(slot.model_id for slot in self._slots)

    def knows(self, model: str) -> bool:
        """Whether a model is called so."""
        return model in self._by_name

    @property
    def limits(self) -> PoolLimits:
        """What holds for all models together."""
        return self._residency.limits

    def gpus(self) -> tuple[GpuStatus, ...]:
        """The own memory of each GPU that is known."""
        return tuple(
            GpuStatus(
                name=gpu,
                budget_bytes=limits.budget_bytes,
                claimed_bytes=self._residency.held_gpu_bytes(gpu),
            )
            for gpu, limits in self.limits.gpus.items()
        )

    @property
    def claimed_bytes(self) -> int:
        """Memory that all models and spare engines hold or were given room for."""
        return self._residency.held_bytes

    def find(self, model: str | None) -> Slot:
        """The slot for a request's `model` field; None means the first model.

        Raises:
            RequestError: 404 model_not_found naming the models there are.
        """
        if model is None:
            return self._slots[0]
        slot = self._by_name.get(model)
        if slot is None:
            known = ", ".join(slot.model_id for slot in self._slots if not slot.spec.unlisted)
            raise RequestError(
                f"there is no model {model[:100]!r}; there are: {known}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return slot

    def start(self) -> None:
        """Start the slots' tasks and load what is to be preloaded; returns at once."""
        self._residency.start(self._standbys)
        for slot in self._slots:
            slot.start()
            if slot.spec.preload:
                slot.want_up()
        self._standbys.start()

    def _demands(self) -> list[Demand]:
        return [demand for slot in self._slots if (demand := slot.demand) is not None]

    def _need_of(self, spec: ModelSpec) -> Need:
        measured = self._footprints.measured(footprint_key(spec))
        return need_of(spec, measured, self._devices.known)

    def _note_facts(self, spec: ModelSpec, facts: ModelFacts) -> None:
        if self._devices.note(gpu_of(spec), facts):
            self._residency.adopt(with_devices(self._limits, self._devices.known))

    def _tell(self, event: SlotEvent) -> None:
        if isinstance(event, Transition):
            self._standbys.note_change()
        if self._on_event is not None:
            self._on_event(event)

    async def ensure_ready(self, model: str, timeout_s: float) -> ModelStatus:
        """Load `model` if need be and wait until it is READY.

        Raises:
            RequestError: 404.
            CapacityError: 503 with the cause, or when `timeout_s` has passed.
        """
        slot = self.find(model)
        await slot.ensure_ready(timeout_s)
        return slot.status()

    async def unload(self, model: str, *, drain_timeout_s: float | None = None) -> None:
        """Drain, stop and keep down until the next request or load; returns when it is gone."""
        await self.find(model).unload(drain_timeout_s)

    async def reload(self, model: str) -> None:
        """Replace the engine, side by side where memory allows; see `Slot.reload`.

        Raises:
            CapacityError: 503, the new engine did not come up and the old one serves on.
        """
        await self.find(model).reload()

    def reset(self, model: str) -> None:
        """Forget crashes and failures of `model`; a FAILED one tries again at once."""
        self.find(model).reset()

    def reconfigure(
        self, models: Sequence[ModelSpec], limits: PoolLimits | None = None
    ) -> ModelChanges:
        """Serve `models` from now on, within other limits; returns at once, engines follow.

        A model that is the same is not touched. One that is gone takes no more requests, finishes
        what it has and stops. One that changed is reloaded.

        Raises:
            ConfigError: two models with one name, or no model; nothing has changed then.
        """
        old = {slot.model_id: slot for slot in self._slots}
        changes = compare_models([slot.spec for slot in self._slots], models)
        new = {spec.id: Slot(spec, self._context) for spec in models if spec.id in changes.added}
        slots = tuple(new.get(spec.id) or old[spec.id] for spec in models)
        self._by_name = _by_name([(slot, spec) for slot, spec in zip(slots, models, strict=True)])
        self._slots = slots
        if limits is not None and limits != self._limits:
            self._limits = limits
            self._residency.adopt(with_devices(limits, self._devices.known))
            for slot in slots:
                slot.take_limits()
        for spec in models:
            if spec.id in changes.added:
                new[spec.id].start()
                if spec.preload:
                    new[spec.id].want_up()
            elif spec.id in changes.adjusted:
                old[spec.id].adjust(spec)
            elif spec.id in changes.replaced:
                task = asyncio.create_task(_replace(old[spec.id], spec))
                self._reloading.add(task)
                task.add_done_callback(self._reloading.discard)
        for id in changes.removed:
            self._leave(old[id])
        return changes

    def _leave(self, slot: Slot) -> None:
        limit = self._context.settings.drain_timeout_s
        task = asyncio.create_task(slot.leave(limit), name=f"leave {slot.model_id}")
        self._leaving[slot] = task
        task.add_done_callback(lambda _: self._leaving.pop(slot, None))

    async def _end_leaving(self, limit_s: float) -> None:
        """Wait for slots that leave, and cut those that would take longer than `limit_s`."""
        leaving = dict(self._leaving)
        if leaving:
            _, late = await asyncio.wait(leaving.values(), timeout=limit_s)
            for slot, task in leaving.items():
                if task in late:
                    slot.cut()
            await asyncio.gather(*leaving.values())

    async def stop(self, shutdown_timeout_s: float) -> None:
        """Refuse new requests, drain, stop every engine; nothing is left when this returns."""
        self._residency.stop()
        limit = max(0.0, shutdown_timeout_s - min(STOP_MARGIN_S, shutdown_timeout_s / 4))
        try:
            async with asyncio.timeout(shutdown_timeout_s + REAP_LIMIT_S):
                await asyncio.gather(
                    self._standbys.stop(),
                    self._end_leaving(limit),
                    *(slot.stop(limit) for slot in self._slots),
                )
        except TimeoutError:
            left = [slot.model_id for slot in self._slots if slot.status().pid is not None]
            log_event("pool.stop_incomplete", logging.WARNING, models=left)

    def cut(self) -> None:
        """Hurry a running `stop`: kill what is left now (a second signal)."""
        for slot in (*self._slots, *self._leaving):
            slot.cut()

    def snapshot(self) -> tuple[ModelStatus, ...]:
        """The state of every model, in configured order, from memory."""
        return tuple(slot.status() for slot in self._slots)

    def standbys(self) -> tuple[StandbyStatus, ...]:
        """The spare engine processes, from memory but for their size."""
        return self._standbys.status()

    def output(self, model: str) -> tuple[str, ...]:
        """The last lines (at most 2,000) that `model`'s engine wrote to stdout and stderr."""
        return self.find(model).output


def _names_of(slots: Sequence[Slot]) -> list[tuple[Slot, ModelSpec]]:
    return [(slot, slot.spec) for slot in slots]


async def _replace(slot: Slot, spec: ModelSpec) -> None:
    """Reload without anybody who waits for it: a failure is logged, and shown in the status."""
    try:
        await slot.reload(spec)
    except CapacityError as error:
        log_event("model.not_replaced", logging.WARNING, model=slot.model_id, reason=error.message)


def _by_name(served: Sequence[tuple[Slot, ModelSpec]]) -> dict[str, Slot]:
    """Ids and aliases; then, where nobody is called so, what mlx-lm's clients ask for."""
    if not served:
        raise ConfigError("there is no model to serve.")
    names: dict[str, Slot] = {}
    for slot, spec in served:
        for name in (spec.id, *spec.aliases):
            if names.setdefault(name, slot) is not slot:
                raise ConfigError(
                    f"two models are called {name}; give one of them another name "
                    "(--served-model-name, once per model)."
                )
    for slot, spec in served:
        names.setdefault(spec.model, slot)
    names.setdefault(MLX_LM_NAME, served[0][0])
    return names
