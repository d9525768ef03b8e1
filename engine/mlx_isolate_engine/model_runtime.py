"""The real runtime: joins model loading, prompt cache, generation thread and completion service.

Everything that imports mlx is imported inside the functions: the process must guard its lifeline
and read its spec before those seconds pass.
"""

import asyncio
import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_isolate_engine.runtime import LoadingReport, Runtime
from mlx_isolate_shared.wire import Loading, ModelFacts, Prepare, Progress, Start

if TYPE_CHECKING:
    from mlx_isolate_engine.completion.service import ModelCompletionService
    from mlx_isolate_engine.generation.ports import LoadedModel
    from mlx_isolate_engine.generation.thread import GenerationThread

_MODEL_MODULES = (
    "mlx_isolate_engine.cache.prompt_cache",
    "mlx_isolate_engine.completion.service",
    "mlx_isolate_engine.generation.thread",
    "mlx_isolate_engine.model.load",
    "mlx_isolate_engine.model.resolve",
)

log = logging.getLogger("engine.runtime")


def prepare_model(prepare: Prepare) -> None:
    """Do ahead what a standby may: the imports that cost seconds."""
    _import_model_libraries()


def _import_model_libraries() -> None:
    for name in _MODEL_MODULES:
        importlib.import_module(name)


async def load_runtime(start: Start, loading: LoadingReport) -> Runtime:
    """Load the model on its generation thread.

    Raises:
        ModelError: it can never work as configured.
    """
    loading(Loading(stage="import"))
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, _import_model_libraries)

    from mlx_isolate_engine.cache.prompt_cache import PromptCache
    from mlx_isolate_engine.completion.service import ModelCompletionService
    from mlx_isolate_engine.generation.thread import GenerationThread
    from mlx_isolate_engine.model.load import load_model, warm_up
    from mlx_isolate_engine.model.resolve import resolve_model

    failure: asyncio.Future[str] = loop.create_future()
    settings = start.settings

    def load() -> "LoadedModel":
        folder = resolve_model(start.model, Path(start.cache_home), loading)
        loaded = load_model(folder, settings, loading)
        warm_up(loaded, loading)
        return loaded

    def make_prompt_cache(loaded: "LoadedModel") -> PromptCache | None:
        if settings.prompt_cache_size == 0:
            return None
        return PromptCache(
            entries_max=settings.prompt_cache_size, bytes_max=settings.prompt_cache_bytes
        )

    def on_failure(error: BaseException) -> None:
        log.error("generation.failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        loop.call_soon_threadsafe(_resolve, failure, reason)

    thread = GenerationThread(
        settings, load, make_prompt_cache=make_prompt_cache, on_failure=on_failure
    )
    loaded = await thread.start()
    return ModelRuntime(thread, ModelCompletionService(thread, settings), loaded.facts, failure)


def _resolve(failure: asyncio.Future[str], reason: str) -> None:
    if not failure.done():
        failure.set_result(reason)


class ModelRuntime:
    """Implements `Runtime` for a started generation thread."""

    def __init__(
        self,
        thread: "GenerationThread",
        service: "ModelCompletionService",
        facts: ModelFacts,
        failure: asyncio.Future[str],
    ) -> None:
        self._thread = thread
        self.service = service
        self.facts = facts
        self.failure = failure

    def progress(self) -> Progress:
        """Counters now, without the footprint."""
        return self._thread.progress()

    async def close(self) -> None:
        """Stop generating and give back what the model holds."""
        await self.service.close()
        await self._thread.stop()
