"""What a lane is, and what the lanes of one generation thread share."""

from dataclasses import dataclass
from typing import Any, Protocol

from mlx_isolate_engine.generation.counters import Counters
from mlx_isolate_engine.generation.outbox import Deliveries
from mlx_isolate_engine.generation.ports import Adapters
from mlx_isolate_engine.generation.reuse import PrefixReuse
from mlx_isolate_engine.generation.row import ModelFamily
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_shared.clock import Clock
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class LaneParts:
    """Everything that a lane works with.

    Attributes:
        model: mlx_lm's model.
        draft: mlx_lm's draft model, None = there is none.
        adapters: what completions may choose among, None = there are none.
        family: what all its rows share.
        settings: concurrency, step sizes, KV quantization, the stall buffer.
        reuse: the prompt cache.
        counters: told what happens.
        deliveries: takes events and ends.
        clock: for pacing and timings.
    """

    model: Any
    draft: Any
    adapters: Adapters | None
    family: ModelFamily
    settings: EngineSettings
    reuse: PrefixReuse
    counters: Counters
    deliveries: Deliveries
    clock: Clock


class Lane(Protocol):
    """One mechanism that runs completions; every method belongs to the generation thread."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def wait_s(self) -> float:
        """How long a step may wait for more to come, in seconds; 0 = it has something to do."""
        ...

    def flushes_soon(self) -> bool:
        """Whether its next step begins by handing over what the last one delivered.

        It does so when the thread stops needing the interpreter: the event loop, which is woken,
        would else be in its way.
        """
        ...

    def submit(self, ticket: Ticket) -> None:
        """A new completion waits for its turn."""
        ...

    def drop(self, ticket: Ticket) -> None:
        """Take a completion out, in whatever phase it is; harmless if it is not here."""
        ...

    def resume(self, ticket: Ticket) -> None:
        """The reader of a parked completion has caught up; harmless if it is not here."""
        ...

    def step(self) -> None:
        """One bounded piece of work."""
        ...

    def close(self, error: EngineError) -> None:
        """End everything with `error` and give back what the lane holds."""
        ...
