"""The completion service: prepares requests against the model and runs them on its thread."""

from mlx_isolate_engine.completion.request import CompletionRequest
from mlx_isolate_engine.completion.seam import PreparedCompletion
from mlx_isolate_engine.generation.thread import GenerationThread
from mlx_isolate_shared.config import EngineSettings


class ModelCompletionService:
    """Implements `CompletionService` for the model of one started generation thread.

    Use on the event loop on which the thread was started::

        thread = GenerationThread(settings, lambda: load_model(folder, settings, report))
        loaded = await thread.start()
        service = ModelCompletionService(thread, settings)
        ...
        await service.close()  # refuses new work, waits for nothing
        await thread.stop()
    """

    def __init__(self, thread: GenerationThread, settings: EngineSettings) -> None: ...

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """See `CompletionService.prepare`."""
        raise NotImplementedError

    async def count_tokens(self, request: CompletionRequest) -> int:
        """See `CompletionService.count_tokens`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop admission and the template pool; running completions go on."""
        raise NotImplementedError
