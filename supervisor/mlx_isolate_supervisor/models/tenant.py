"""What the residency asks of a slot and of the spare engines, and what it tells them; no code."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from mlx_isolate_shared.errors import CapacityError


class Tenancy(msgspec.Struct, frozen=True, kw_only=True):
    """What a slot says of itself when asked; see `room.Resident`.

    Attributes:
        has_waiting: requests wait for it.
        measured_bytes: what its processes hold now, 0 where not known yet.
        gpu, measured_gpu_bytes: the same of a GPU's own memory; see `room.Need`.
        engines: its engine (or the respawn of it), its successor, and those that still drain.
    """

    measured_bytes: int
    gpu: str = ""
    measured_gpu_bytes: int = 0
    is_idle: bool
    has_waiting: bool
    is_leaving: bool
    is_pinned: bool
    is_lasting: bool
    engines: int
    used_s: float
    turn_s: float


class Tenant(Protocol):
    """A slot, as the residency sees it."""

    @property
    def model_id(self) -> str:
        """The id that clients use."""
        ...

    def tenancy(self) -> Tenancy:
        """Facts, from memory."""
        ...

    def take_room(self) -> None:
        """What was asked for is granted."""
        ...

    def miss_room(self, make_error: Callable[[], CapacityError] | None) -> None:
        """It is refused, or (None) dropped, since nobody waits for it."""
        ...

    def make_room(self, reason: str) -> None:
        """Leave, if still idle."""
        ...

    def step_aside(self, reason: str) -> None:
        """Leave, since the model that replaces this one is ready."""
        ...

    def look_again(self) -> None:
        """Nobody is held back any more."""
        ...


class Spares(Protocol):
    """The spare engines, as far as they are in the way."""

    @property
    def held_bytes(self) -> int:
        """What all of them hold."""
        ...

    def shed(self) -> None:
        """End all of them."""
        ...
