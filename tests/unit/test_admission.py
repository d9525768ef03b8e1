"""The queue of a slot: order, leaving, and the moment in which a grant meets a cancellation."""

import asyncio

import pytest

from mlx_isolate_shared.errors import CapacityError, EngineError
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.slots.admission import SlotLease, Waiter, WaitingLine
from mlx_isolate_supervisor.slots.lease import Outcome


class Engine:
    socket_path = "/nowhere"
    number = 1
    is_dying = False

    async def death(self) -> EngineError:
        return causes.died(None, planned=False)


class Desk:
    """Makes leases and remembers what came back."""

    def __init__(self) -> None:
        self.returned: list[tuple[str, Outcome]] = []

    def lease(self, waiter: Waiter) -> SlotLease:
        return SlotLease(Engine(), waiter.request_id, self._take_back, lambda: None)

    def _take_back(self, lease: SlotLease, outcome: Outcome) -> None:
        self.returned.append((lease.request_id, outcome))


def test_places_are_given_in_the_order_of_arrival() -> None:
    async def main() -> None:
        line, desk = WaitingLine(), Desk()
        waiters = [Waiter(str(number)) for number in range(5)]
        for waiter in waiters:
            line.join(waiter)
        line.leave(waiters[1])
        waiters[2].place.cancel()
        granted = [lease.request_id for _ in range(5) if (lease := line.grant_first(desk.lease))]
        assert granted == ["0", "3", "4"]

    asyncio.run(main())


def test_who_leaves_in_the_moment_of_the_grant_gives_the_place_back() -> None:
    async def main() -> None:
        line, desk = WaitingLine(), Desk()
        waiter = Waiter("1")
        line.join(waiter)
        task = asyncio.create_task(waiter.wait_place())
        await asyncio.sleep(0)
        line.grant_first(desk.lease)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert desk.returned == [("1", "cancelled")]

    asyncio.run(main())


def test_who_leaves_in_the_moment_of_a_refusal_is_just_gone() -> None:
    async def main() -> None:
        line = WaitingLine()
        waiter = Waiter("1")
        line.join(waiter)
        task = asyncio.create_task(waiter.wait_place())
        await asyncio.sleep(0)
        line.refuse(waiter, causes.shutting_down())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_everybody_is_refused_with_an_error_of_their_own() -> None:
    async def main() -> None:
        line = WaitingLine()
        waiters = [Waiter(str(number)) for number in range(3)]
        for waiter in waiters:
            line.join(waiter)
        line.refuse_all(causes.shutting_down)
        errors = [waiter.place.exception() for waiter in waiters]
        assert all(isinstance(error, CapacityError) for error in errors)
        assert len({id(error) for error in errors}) == 3
        assert len(line) == 0

    asyncio.run(main())


def test_a_lease_is_released_once() -> None:
    async def main() -> None:
        lease = Desk().lease(Waiter("1"))
        lease.release("answered")
        with pytest.raises(AssertionError, match="released twice"):
            lease.release("answered")

    asyncio.run(main())
