"""Which daemon a drill is done to: the operator's, with consent, or a throw-away one."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import aiohttp
import msgspec

from mlx_isolate_supervisor.drills.catalogue import Drill
from mlx_isolate_supervisor.drills.record import CannotRun, Record, reason_of
from mlx_isolate_supervisor.drills.scene import Scene
from mlx_isolate_supervisor.drills.throwaway import OwnDaemon, OwnPlan
from mlx_isolate_supervisor.drills.traffic import Client


class RunningDaemon(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's daemon.

    Attributes:
        url: where it listens, on this machine.
        api_key: to be sent.
        model: which model; None = its first.
    """

    url: str
    api_key: str | None = None
    model: str | None = None


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where drills are done.

    Attributes:
        running: the operator's daemon; None = throw-away ones only.
        own: what throw-away ones serve; None = none may be used.
        consent: asked before a daemon with other people's requests is touched, with a sentence.
    """

    running: RunningDaemon | None
    own: OwnPlan | None
    consent: Callable[[str], bool]


class Stage:
    """Opens scenes; keeps a throw-away daemon from one drill to the next that can use the same.

    A daemon that has been through many drills is nearer to life than a new one, and each start of
    an engine costs seconds. Its memory of crashes is wiped, which would only make the next wait.

    Args:
        plan: where drills are done.
    """

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        self._kept: OwnDaemon | None = None

    @contextlib.asynccontextmanager
    async def open(self, drill: Drill, record: Record) -> AsyncGenerator[Scene]:
        """A scene for one drill, its model ready and its prober at work.

        Raises:
            CannotRun: there is no daemon to which this may be done.
        """
        if self._plan.running is not None and not drill.own_because:
            async with self._open_running(self._plan.running, drill, record) as scene:
                yield scene
            return
        if self._plan.own is None:
            raise CannotRun(f"it needs a throw-away daemon, since {drill.own_because}")
        own = await self._own(self._plan.own, drill)
        record.daemon, record.is_own = own.url, True
        try:
            async with Client(own.url, None, self._plan.own.fields) as client:
                scene = Scene(record, client, own, drill.models[0])
                async with scene.open():
                    yield scene
                if own.is_running and record.is_kept:
                    await scene.pardon()
        except BaseException:
            # Nobody knows what it is like now.
            await self.close()
            raise
        if not record.is_kept:
            await self.close()

    async def close(self) -> None:
        """Remove the throw-away daemon that was kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.remove()

    @contextlib.asynccontextmanager
    async def _open_running(
        self, running: RunningDaemon, drill: Drill, record: Record
    ) -> AsyncGenerator[Scene]:
        record.daemon = running.url
        fields = self._plan.own.fields if self._plan.own is not None else {}
        async with Client(running.url, running.api_key, fields) as client:
            try:
                others = await _requests_of_others(client)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise CannotRun(f"the daemon does not answer: {reason_of(error)}") from error
            except msgspec.DecodeError as error:
                raise CannotRun(f"what answers at {running.url} is not mlx-isolate") from error
            if others and not self._plan.consent(
                f"{others} requests of others run on {running.url}; do the drill {drill.name} "
                "nevertheless?"
            ):
                raise CannotRun(f"{others} requests of others run there; --yes does it anyway")
            scene = Scene(record, client, None, running.model)
            async with scene.open():
                yield scene

    async def _own(self, plan: OwnPlan, drill: Drill) -> OwnDaemon:
        kept = self._kept
        wanted = (drill.flags, drill.models)
        if kept is not None and kept.is_running and (kept.flags, kept.models) == wanted:
            return kept
        await self.close()
        self._kept = OwnDaemon(plan, drill.flags, drill.models)
        await self._kept.start()
        return self._kept


class _Requests(msgspec.Struct):
    requests: list[Any]


async def _requests_of_others(client: Client) -> int:
    found = msgspec.json.decode(await client.get("/v1/requests"), type=_Requests)
    return len(found.requests)
