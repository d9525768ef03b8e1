"""The one thread that loads the model and generates: its life, its inbox and its loop."""

import asyncio
from collections.abc import Callable

from mlx_isolate_engine.generation.ports import LoadedModel, LoadModel, MakePromptCache
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Progress


class GenerationThread:
    """Owns the model, its MLX stream and every completion that is being generated.

    Args:
        settings: the engine's settings.
        load: loads model and tokenizer; called on the generation thread, since MLX streams
            belong to the thread that made them.
        make_prompt_cache: called on the generation thread after the load; None = no prompt cache.
        on_failure: called on the generation thread with the error that ended its loop; the
            default prints the traceback and ends the process with status 70.
    """

    def __init__(
        self,
        settings: EngineSettings,
        load: LoadModel,
        *,
        make_prompt_cache: MakePromptCache | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None: ...

    async def start(self) -> LoadedModel:
        """Start the thread on the running event loop; returns after load and warm-up pass.

        Raises what `load` raised (ConfigError: it can never work as configured).
        """
        raise NotImplementedError

    def progress(self) -> Progress:
        """Counters, MLX memory and cache figures now; the caller adds the process footprint.

        Callable from any thread, never blocks.
        """
        raise NotImplementedError

    async def stop(self) -> None:
        """End the loop after the current step; completions still running fail."""
        raise NotImplementedError

    def _unused(self) -> asyncio.AbstractEventLoop:
        raise NotImplementedError
