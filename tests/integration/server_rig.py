"""The engine's HTTP server on a real unix socket in front of scripted completions, to be asked."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from mlx_isolate_engine.server import EngineServer
from mlx_isolate_shared.config import EngineSettings
from tests.fakes.scripted_service import IDENTITY, ScriptedService, Step
from tests.raw_http import ask

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
STREAM: dict[str, Any] = {**HELLO, "stream": True}


class Served:
    """A running server with what it runs."""

    def __init__(self, server: EngineServer, service: ScriptedService, path: str) -> None:
        self.server = server
        self.service = service
        self.path = path
        self.completed = 0

    async def chat(self, body: bytes | dict[str, Any], **more: Any) -> Any:
        return await ask(self.path, CHAT, body, **more)


@asynccontextmanager
async def serving(
    service: ScriptedService, settings: EngineSettings | None = None
) -> AsyncGenerator[Served, None]:
    with tempfile.TemporaryDirectory(prefix="mi", dir="/tmp") as folder:
        path = f"{folder}/s"

        def count() -> None:
            served.completed += 1

        server = EngineServer(service, IDENTITY, settings or EngineSettings(), on_completed=count)
        served = Served(server, service, path)
        await server.start(path)
        try:
            yield served
        finally:
            await server.stop(0)
            assert service.open == 0, "a prepared completion was not given back"
            assert server.active == 0


def run(
    scenario: Callable[[Served], Awaitable[None]],
    steps: Sequence[Step] = (),
    settings: EngineSettings | None = None,
    **service: Any,
) -> None:
    async def main() -> None:
        async with serving(ScriptedService(steps, **service), settings) as served:
            await scenario(served)

    asyncio.run(main())
