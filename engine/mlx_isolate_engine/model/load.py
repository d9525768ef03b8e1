"""Loading a model's weights and tokenizer in the thread that will generate with them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_isolate_engine.model.adapters import add_adapter
from mlx_isolate_engine.model.architecture import check_architecture
from mlx_isolate_engine.model.errors import FOREIGN_ERRORS, ModelError, first_sentence
from mlx_isolate_engine.model.facts import facts_of
from mlx_isolate_engine.model.folder import ModelFiles, check_folder
from mlx_isolate_engine.model.tokenizer import load_tokenizer
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Loading, ModelFacts

# Weights are read in groups of about this size, with a progress line after each.
WEIGHTS_GROUP_BYTES = 256 << 20
# Prompt and decode steps of the warm-up: enough to compile the kernels of both.
WARM_UP_PROMPT = 16
WARM_UP_STEPS = 2


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
    folder: Path,
    settings: EngineSettings,
    report: Callable[[Loading], None],
    tokenizer: Any = None,
) -> LoadedModel:
    """Load weights (with the adapter, if set) and tokenizer. Call it in the generation thread.

    Args:
        folder: from `resolve_model`.
        settings: adapter_path, trust_remote_code and the chat template settings are used.
        report: gets `Loading` lines of the stages `weights` and `tokenizer`.
        tokenizer: what `load_tokenizer` gave a standby ahead, for this folder and these settings.

    Raises:
        ModelError: the files or settings can never work.
    """
    files = check_folder(folder)
    report(Loading(stage="weights", fraction=0.0))
    model, config = _build(files, settings)
    if settings.adapter_path is not None:
        add_adapter(model, Path(settings.adapter_path))
    _read_weights(model, report)
    if tokenizer is None:
        report(Loading(stage="tokenizer"))
        tokenizer = load_tokenizer(folder, settings, config.get("eos_token_id"))
    facts = facts_of(model, tokenizer, config)
    return LoadedModel(model=model, tokenizer=tokenizer, facts=facts, folder=folder)


def warm_up(loaded: LoadedModel, report: Callable[[Loading], None]) -> None:
    """One small prefill and a few decode steps, in the thread that loaded the model.

    On a GPU this compiles the kernels, which takes up to half a minute.

    Raises:
        ModelError: the model cannot compute (its weights do not fit its configuration).
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    report(Loading(stage="warmup"))
    last = max(0, loaded.facts.vocab_size - 1)
    try:
        cache = make_prompt_cache(loaded.model)
        tokens = mx.array([[min(number, last) for number in range(WARM_UP_PROMPT)]])
        for _ in range(1 + WARM_UP_STEPS):
            logits = loaded.model(tokens, cache=cache)[:, -1, :]
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            tokens = mx.argmax(logits, axis=-1, keepdims=True)
            mx.eval(tokens, logits, [entry.state for entry in cache])
    except FOREIGN_ERRORS as error:
        raise _translated(loaded.folder, error) from error
    mx.clear_cache()


def _build(files: ModelFiles, settings: EngineSettings) -> tuple[Any, dict[str, Any]]:
    """The model with its weights mapped but not yet read, and its configuration."""
    from mlx_lm.utils import load_model as load

    check_architecture(files, trust_remote_code=settings.trust_remote_code)
    try:
        model, config = load(files.folder, lazy=True, trust_remote_code=settings.trust_remote_code)
    except FOREIGN_ERRORS as error:
        raise _translated(files.folder, error) from error
    return model, config


def _read_weights(model: Any, report: Callable[[Loading], None]) -> None:
    """Read the mapped weights group by group, with a progress line after each."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    total = sum(int(array.nbytes) for array in arrays) or 1
    done = 0
    group: list[Any] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += int(array.nbytes)
        if size >= WEIGHTS_GROUP_BYTES:
            mx.eval(group)
            done, group, size = done + size, [], 0
            detail = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
            report(Loading(stage="weights", fraction=done / total, detail=detail))
    # Everything that is no parameter (rotary frequencies and the like) with the rest.
    mx.eval(group, model.parameters())
    report(Loading(stage="weights", fraction=1.0))


def _translated(folder: Path, error: Exception) -> ModelError:
    text = first_sentence(error)
    if "malloc" in text or "out of memory" in text.lower():
        return ModelError("out_of_memory", f"there is not enough memory for {folder}: {text}")
    return ModelError("model_broken", f"cannot load the model in {folder}: {text}")
