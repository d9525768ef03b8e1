"""The real runtime: joins model loading, prompt cache, generation thread and completion service.

Everything that imports mlx is imported inside the functions: the process must guard its lifeline
and read its spec before those seconds pass.
"""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_isolate_engine.ahead import Ahead, import_model_libraries, prepare_ahead
from mlx_isolate_engine.runtime import LoadingReport, Runtime
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Loading, ModelFacts, Prepare, Progress, Start

if TYPE_CHECKING:
    from mlx_isolate_engine.cache.fingerprint import Fingerprint
    from mlx_isolate_engine.cache.prompt_cache import PromptCache
    from mlx_isolate_engine.completion.service import ModelCompletionService
    from mlx_isolate_engine.completion.text_log import TextLog
    from mlx_isolate_engine.generation.ports import LoadedModel
    from mlx_isolate_engine.generation.thread import GenerationThread
    from mlx_isolate_engine.model.adapters import AdapterRack

log = logging.getLogger("engine.runtime")

# Adapter, template and the like belong to the model itself, not to its draft model.
DRAFT_SETTINGS = EngineSettings()

# Longest time that an engine asked to stop spends on writing its prompt cache; together with the
# time for its last completions it stays below the supervisor's 30 s between SIGTERM and SIGKILL.
FLUSH_AT_EXIT_S = 20.0


class ModelLoader:
    """Loads the real runtime, with what was prepared ahead of it."""

    def __init__(self) -> None:
        self._ahead: Ahead | None = None

    def prepare(self, prepare: Prepare) -> None:
        """Do ahead what a standby may; blocks while it does."""
        self._ahead = prepare_ahead(prepare)

    async def load(self, start: Start, loading: LoadingReport) -> Runtime:
        """Load the model on its generation thread.

        Raises:
            ModelError: it can never work as configured, or not just now.
        """
        return await load_runtime(start, loading, self._ahead)


async def load_runtime(start: Start, loading: LoadingReport, ahead: Ahead | None = None) -> Runtime:
    """Load the model on its generation thread.

    Raises:
        ModelError: it can never work as configured.
    """
    loading(Loading(stage="import"))
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, import_model_libraries)

    from mlx_isolate_engine.cache.build import build_prompt_cache, check_settings, identify
    from mlx_isolate_engine.completion.service import ModelCompletionService
    from mlx_isolate_engine.completion.text_log import TextLog
    from mlx_isolate_engine.generation.rehearsal import REHEARSAL_S, RESPAWN_S
    from mlx_isolate_engine.generation.thread import GenerationThread
    from mlx_isolate_engine.model.adapters import AdapterRack
    from mlx_isolate_engine.model.load import load_model, warm_up
    from mlx_isolate_engine.model.resolve import resolve_model

    failure: asyncio.Future[str] = loop.create_future()
    settings = start.settings
    check_settings(settings)
    runtime = ModelRuntime(failure)

    def load() -> "LoadedModel":
        folder = resolve_model(start.model, Path(start.cache_home), loading)
        runtime.folder = folder
        if settings.ssd_cache_dir is not None:
            with contextlib.suppress(OSError):  # the load says it better
                runtime.before_load = identify(settings, folder)
        tokenizer = ahead.tokenizer if ahead is not None and ahead.fits(folder, start) else None
        loaded = load_model(folder, settings, loading, tokenizer)
        warm_up(loaded, loading)
        return loaded

    def load_draft() -> "LoadedModel":
        folder = resolve_model(str(settings.draft_model), Path(start.cache_home), loading)
        return load_model(folder, DRAFT_SETTINGS, loading)

    def load_adapters(loaded: "LoadedModel") -> "AdapterRack":
        return AdapterRack(loaded.model, settings.adapters)

    def make_prompt_cache(loaded: "LoadedModel") -> Any:
        runtime.cache = build_prompt_cache(start, runtime.folder, runtime.before_load)
        return runtime.cache

    def on_failure(error: BaseException) -> None:
        log.error("generation.failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        loop.call_soon_threadsafe(_resolve, failure, reason)

    thread = GenerationThread(
        settings,
        load,
        load_draft=None if settings.draft_model is None else load_draft,
        load_adapters=load_adapters if settings.adapters else None,
        make_prompt_cache=make_prompt_cache,
        on_failure=on_failure,
        rehearsal_s=REHEARSAL_S if start.incarnation == 1 else RESPAWN_S,
    )
    loaded = await thread.start()
    service = ModelCompletionService(thread, settings)
    runtime.begin(thread, TextLog(service) if settings.log_text else service, loaded.facts)
    return runtime


def _resolve(failure: asyncio.Future[str], reason: str) -> None:
    if not failure.done():
        failure.set_result(reason)


class ModelRuntime:
    """Implements `Runtime` for a started generation thread."""

    def __init__(self, failure: asyncio.Future[str]) -> None:
        self.failure = failure
        self.cache: PromptCache | None = None
        self.before_load: Fingerprint | None = None
        self.folder = Path()

    def begin(
        self,
        thread: "GenerationThread",
        service: "ModelCompletionService | TextLog",
        facts: ModelFacts,
    ) -> None:
        """Take over what has been loaded and started."""
        self._thread = thread
        self.service = service
        self.facts = facts

    def progress(self) -> Progress:
        """Counters now, without the footprint."""
        return self._thread.progress()

    async def close(self) -> None:
        """Stop generating, make the prompt cache durable, give back what the model holds."""
        await self.service.close()
        cache, self.cache = self.cache, None
        if cache is not None:
            await asyncio.to_thread(cache.close, FLUSH_AT_EXIT_S)
        del cache  # the generation thread lets go of its arrays last
        await self._thread.stop()
