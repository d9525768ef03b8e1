"""All models of this supervisor: name or alias to slot, start of all, stop of all."""

from collections.abc import Callable, Sequence

from mlx_isolate_shared.clock import Clock, SystemClock
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.lease import Admission
from mlx_isolate_supervisor.rundir import RunDirectory
from mlx_isolate_supervisor.slot_settings import EngineCommand, SlotSettings
from mlx_isolate_supervisor.status import ModelStatus, SlotEvent

EventListener = Callable[[SlotEvent], None]


class Pool:
    """The slots, in configured order; implements `lease.Router`.

    To be made and used on the main thread's event loop: engines get their parent-death signal when
    the *thread* that spawned them ends.

    Args:
        models: at least one; ids and aliases unique over all of them.
        run_directory: acquired by the caller, who also releases it after `stop`.
        on_event: called on the loop for every transition and load step; must not block or raise.

    Raises:
        ConfigError: two models with one name.
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
    ) -> None:
        self._clock = clock or SystemClock()
        raise NotImplementedError

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Ids in configured order."""
        raise NotImplementedError

    def find(self, model: str | None) -> Admission:
        """The slot for a request's `model` field; None means the first model.

        Raises:
            RequestError: 404 model_not_found naming the models there are.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Start the slots' tasks and load what is to be preloaded; returns at once."""
        raise NotImplementedError

    async def ensure_ready(self, model: str, timeout_s: float) -> ModelStatus:
        """Load `model` if need be and wait until it is READY.

        Raises:
            RequestError: 404.
            CapacityError: 503 with the cause, or when `timeout_s` has passed.
        """
        raise NotImplementedError

    async def unload(self, model: str, *, drain_timeout_s: float | None = None) -> None:
        """Drain, stop and keep down until the next request or load; returns when STOPPED."""
        raise NotImplementedError

    async def reload(self, model: str) -> None:
        """Drain and replace the engine; returns when the replacement is READY or FAILED."""
        raise NotImplementedError

    def reset(self, model: str) -> None:
        """Forget crashes and failures of `model`; a FAILED one tries again at once."""
        raise NotImplementedError

    async def stop(self, shutdown_timeout_s: float) -> None:
        """Refuse new requests, drain, stop every engine; nothing is left when this returns."""
        raise NotImplementedError

    def cut(self) -> None:
        """Hurry a running `stop`: kill what is left now (a second signal)."""
        raise NotImplementedError

    def snapshot(self) -> tuple[ModelStatus, ...]:
        """The state of every model, in configured order, from memory."""
        raise NotImplementedError

    def output(self, model: str) -> tuple[str, ...]:
        """The last lines (at most 2,000) that `model`'s engines wrote to stdout and stderr."""
        raise NotImplementedError
