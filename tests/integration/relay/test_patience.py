"""Nothing in the relay ends a request because it takes long: hours pass, and the answer comes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.integration.relay.engine_side import END, event, whole
from tests.integration.relay.rig import make_rig

HOURS_S = 6 * 3600.0


class LateLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test sets forward, so that every timer until then is due."""

    late_s = 0.0

    def time(self) -> float:
        return super().time() + self.late_s


async def let_hours_pass(loop: LateLoop) -> None:
    """Make every timer of the next hours run now, those too that such timers set."""
    for _ in range(6):
        loop.late_s += HOURS_S / 6
        # A turn for what is due, and one for what that wakes.
        for _ in range(5):
            await asyncio.sleep(0)


async def before_the_first_byte(loop: LateLoop) -> None:
    async with make_rig() as rig:
        client, side = await rig.ask()
        await let_hours_pass(loop)
        await side.send(whole(b'{"late":1}'))
        assert (await client.read_answer()).body == b'{"late":1}'


async def between_two_events(loop: LateLoop) -> None:
    async with make_rig() as rig:
        client, side = await rig.open_stream()
        await let_hours_pass(loop)
        await side.send(event("last") + END)
        assert await client.read_chunk() == b"data: last\n\n"
        assert await client.read_chunk() == b""


@pytest.mark.case("x5")
@pytest.mark.parametrize("scenario", [before_the_first_byte, between_two_events])
def test_a_silence_of_hours_ends_no_request(
    scenario: Callable[[LateLoop], Coroutine[Any, Any, None]],
) -> None:
    loop = LateLoop()
    try:
        loop.run_until_complete(scenario(loop))
    finally:
        loop.close()
