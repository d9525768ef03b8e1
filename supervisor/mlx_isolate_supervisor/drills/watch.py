"""The event stream of the daemon under drill: what the supervisor noticed, and when."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from mlx_isolate_supervisor.drills.traffic import Client


class Watch:
    """Events of one daemon since `open`. Times are the daemon's, seconds since the epoch.

    Args:
        client: how to reach it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.events: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._opened = asyncio.Event()
        self._lost: aiohttp.ClientError | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Subscribe; returns once events come.

        Raises:
            aiohttp.ClientError: the daemon refuses, or has gone.
        """
        self._task = asyncio.create_task(self._run())
        await self._opened.wait()
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        """Unsubscribe."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async for line in self._client.follow("/events", self._opened):
                if line.startswith(b"data: "):
                    self.events.append(msgspec.json.decode(line[6:]))
                    self._more.set()
        except aiohttp.ClientError as error:
            # Where events have come before, the daemon has gone: what is missing will be missed.
            self._lost = error
        finally:
            self._opened.set()

    def find(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """The first event so far that is wanted."""
        return next((event for event in self.events if wanted(event)), None)

    async def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first such event, past or to come."""
        while (found := self.find(wanted)) is None:
            self._more.clear()
            await self._more.wait()
        return found


def entered(model: str, states: Sequence[str], incarnation: int) -> Callable[[Any], bool]:
    """Whether an event says that `model` entered one of `states`, by that or a later incarnation."""

    def wanted(event: dict[str, Any]) -> bool:
        return (
            event.get("model") == model
            and event.get("after") in states
            and event.get("before") != event.get("after")
            and int(event.get("incarnation", 0)) >= incarnation
        )

    return wanted
