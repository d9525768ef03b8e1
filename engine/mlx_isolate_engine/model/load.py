"""Loading a model's weights and tokenizer in the thread that will generate with them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Loading, ModelFacts


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        model: mlx-lm's model (nn.Module); its arrays belong to the thread that loaded it.
        tokenizer: mlx_lm's TokenizerWrapper, chat template override applied.
        facts: what it is, for /v1/models and /status.
        folder: where it was loaded from.
    """

    model: Any
    tokenizer: Any
    facts: ModelFacts
    folder: Path


def load_model(
    folder: Path, settings: EngineSettings, report: Callable[[Loading], None]
) -> LoadedModel:
    """Load weights (with the adapter, if set) and tokenizer. Call it in the generation thread.

    Args:
        folder: from `resolve_model`.
        settings: adapter_path, trust_remote_code and the chat template settings are used.
        report: gets `Loading` lines of the stages `weights` and `tokenizer`.

    Raises:
        ModelError: the files or settings can never work.
    """
    raise NotImplementedError


def warm_up(loaded: LoadedModel, report: Callable[[Loading], None]) -> None:
    """One small prefill and one decode step, in the thread that loaded the model."""
    raise NotImplementedError
