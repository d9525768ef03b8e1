"""What the relay needs of a slot: a place in one engine, and the truth about its death."""

from collections.abc import Callable
from typing import Literal, Protocol

from mlx_isolate_shared.errors import EngineError

# How a request ended. `returned` is of a lease alone: its engine could not be connected to, or had
# not read the request to its end, and the request waits for another place. So is `passed`: it was
# answered, but by something that does not show whether the engine completes what it is asked.
Outcome = Literal["answered", "rejected", "failed", "cancelled", "returned", "passed"]


class Lease(Protocol):
    """One request's place in one incarnation of one model's engine."""

    @property
    def socket_path(self) -> str:
        """Where that incarnation listens."""
        ...

    @property
    def incarnation(self) -> int:
        """Number of the incarnation, from 1."""
        ...

    def on_death(self, call: Callable[[], None]) -> None:
        """Have `call` called once nothing of the engine runs any more; at once if that is so.

        Comes before the connection ends, which waits for the kernel to drop the engine's memory;
        where the system cannot tell, it never comes. Not after `release`.
        """
        ...

    async def death(self) -> EngineError:
        """What to tell the client after the connection to the engine broke.

        Waits (bounded, well under a second) until the slot knows why: 502 engine_died with the
        signal or exit code, or 504 engine_hung when the watchdog ended it.
        """
        ...

    def note_upgrade(self) -> None:
        """The request has become a connection that is not an answer, and has no end of its own.

        It keeps its place, but it may be silent for any time, and no drain waits for it.
        """
        ...

    def release(self, outcome: Outcome) -> None:
        """Give the place back. Called exactly once for every lease."""
        ...


class Admission(Protocol):
    """A slot as the relay sees it."""

    @property
    def model_id(self) -> str:
        """The id that clients use."""
        ...

    @property
    def sends_loading_state(self) -> bool:
        """Whether streaming clients are told what they wait for."""
        ...

    def describe_wait(self) -> str:
        """What a request that waits is waiting for, one line for its client."""
        ...

    def keep_alive(self, idle_s: float) -> None:
        """Keep the model loaded for so long after its last request; 0 = not at all.

        Holds until another request asks for something else; infinite = for good.
        """
        ...

    async def admit(self, request_id: str) -> Lease:
        """Wait in the bounded queue for a ready engine with a free place.

        Cancelling the awaiting task leaves the queue. Nothing is leased unless this returns.

        Raises:
            CapacityError: 429 queue full; 503 circuit open, cannot work, queue timeout (with the
                last cause); 507 over the memory budget.
        """
        ...


class Router(Protocol):
    """Name or alias to slot."""

    def knows(self, model: str) -> bool:
        """Whether `find` finds it."""
        ...

    def find(self, model: str | None) -> Admission:
        """The slot for a request's `model` field; None means the first model.

        Raises:
            RequestError: 404 model_not_found naming the models there are.
        """
        ...
