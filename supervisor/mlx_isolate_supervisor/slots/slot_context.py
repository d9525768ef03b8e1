"""What a slot's machine is given: what all slots share, and what it needs of its own slot."""

import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from mlx_isolate_shared.clock import Clock
from mlx_isolate_shared.wire import ModelFacts
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.memory import available_bytes
from mlx_isolate_supervisor.engines.spawner import EngineSource
from mlx_isolate_supervisor.models.footprints import FootprintBook
from mlx_isolate_supervisor.models.residency import Residency
from mlx_isolate_supervisor.models.room import Need
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.status import SlotEvent


def _ignore(_spec: ModelSpec, _facts: ModelFacts) -> None:
    """Nobody wants to know."""


class SlotContext(msgspec.Struct, frozen=True, kw_only=True):
    """What all slots of a supervisor share.

    Attributes:
        on_event: told about every transition and load step; must not block or raise.
        jitter: a random number in -1..1 for the restart delay.
        available_bytes: memory that is free for another engine; None if unknown.
        source: where engine processes come from.
        residency: who may be loaded.
        need_of: what an engine of a model will hold.
        note_facts: takes what an engine says of itself when it is ready; must not raise.
        footprints: what engines held in earlier runs.
    """

    settings: SlotSettings
    source: EngineSource
    residency: Residency
    need_of: Callable[[ModelSpec], Need]
    footprints: FootprintBook
    clock: Clock
    on_event: Callable[[SlotEvent], None] | None = None
    note_facts: Callable[[ModelSpec, ModelFacts], None] = _ignore
    jitter: Callable[[], float] = partial(random.uniform, -1.0, 1.0)
    available_bytes: Callable[[], int | None] = available_bytes


class SlotSide(Protocol):
    """What the machine needs of its slot."""

    def post(self, message: Callable[[], object]) -> None:
        """Put a message into the mailbox."""
        ...

    def refuse_failed(self) -> None:
        """Refuse everybody who waits; on the way into FAILED."""
        ...

    def note_ready(self) -> None:
        """An engine has become ready."""
        ...

    def ask_room(self) -> bool:
        """Whether an engine may be started now; else `take_room` or `miss_room` follows."""
        ...

    def has_space_beside(self) -> bool:
        """Whether the memory budget allows a second engine."""
        ...
