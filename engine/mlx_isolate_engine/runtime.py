"""What an engine process needs of the model that it serves."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from mlx_isolate_engine.cache_routes import CacheControl
from mlx_isolate_engine.completion.seam import CompletionService
from mlx_isolate_shared.wire import Loading, ModelFacts, Prepare, Progress, Start

LoadingReport = Callable[[Loading], None]


class Runtime(Protocol):
    """A loaded model that generates."""

    @property
    def service(self) -> CompletionService:
        """Where protocols take their requests."""
        ...

    @property
    def facts(self) -> ModelFacts:
        """What the model is."""
        ...

    def progress(self) -> Progress:
        """Counters now, without the footprint; any thread may ask, and it never blocks."""
        ...

    @property
    def failure(self) -> asyncio.Future[str]:
        """Resolved with the reason when generation has ended for good."""
        ...

    @property
    def cache(self) -> CacheControl | None:
        """The prompt cache; None where it is switched off."""
        ...

    async def close(self) -> None:
        """Stop generating, make the prompt cache durable within a limit, and give back what the model holds."""
        ...


LoadRuntime = Callable[[Start, LoadingReport], Awaitable[Runtime]]
# What a standby does ahead of its start; blocks while it does.
PrepareModel = Callable[[Prepare], None]
