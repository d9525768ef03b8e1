"""What a loaded model allows: batching, KV quantization, a draft model; and its first pass."""

from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from mlx_isolate_engine.cache import kinds
from mlx_isolate_engine.generation.ports import LoadedModel
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import ConfigError

# What mlx can quantize to.
KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)


def can_batch(settings: EngineSettings, cache: list[Any]) -> bool:
    """Whether completions may run in one batch: kinds of cache that merge, and no KV scheme."""
    return (
        settings.decode_concurrency > 1
        and settings.kv_bits is None
        and all(hasattr(part, "merge") for part in cache)
    )


def check_kv_bits(settings: EngineSettings, cache: list[Any]) -> None:
    """Refuse KV quantization where it would give wrong answers or none.

    Raises:
        ConfigError: in one sentence.
    """
    if settings.kv_bits is None:
        return
    if settings.kv_bits not in KV_BITS or settings.kv_group_size not in KV_GROUP_SIZES:
        raise ConfigError(
            f"--kv-bits can be {', '.join(map(str, KV_BITS))} and --kv-group-size "
            f"{', '.join(map(str, KV_GROUP_SIZES))}."
        )
    if not kinds.allows_kv_bits(cache):
        raise ConfigError(
            f"--kv-bits does not work with this model's cache ({', '.join(kinds.kind_names(cache))})."
        )


def warm_up(model: Any, settings: EngineSettings) -> int:
    """One small prefill and one decode step; returns the width of the model's output.

    On a GPU the first pass of a process compiles kernels for many seconds; nobody should wait for
    that in a request.

    Raises:
        ConfigError: the KV scheme does not fit the model's head size, or the device has no kernel
            for it.
    """
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 8), mx.int32), cache=cache))
    if settings.kv_bits is not None:
        try:
            maybe_quantize_kv_cache(cache, 0, settings.kv_group_size, settings.kv_bits)
        except ValueError as error:
            raise ConfigError(
                f"--kv-group-size {settings.kv_group_size} does not fit this model's heads; "
                f"try {KV_GROUP_SIZES[0]}."
            ) from error
    try:
        logits = model(mx.zeros((1, 1), mx.int32), cache=cache)
        mx.eval(logits)
    except RuntimeError as error:
        if settings.kv_bits is None:
            raise
        raise ConfigError(
            f"--kv-bits {settings.kv_bits} does not work with this model on this device: MLX says "
            f'"{error}". Leave it out.'
        ) from error
    return int(logits.shape[-1])


def check_draft(loaded: LoadedModel, draft: LoadedModel) -> None:
    """Refuse a draft model with which answers would be wrong.

    Rejected tokens are cut off both caches, which must allow that; and both models must mean the
    same by a token.

    Raises:
        ConfigError: in one sentence.
    """
    for each in (loaded, draft):
        cache = make_prompt_cache(each.model)
        # mlx-lm finds the draft model's part of the cache by the number of layers.
        if not kinds.allows_draft(cache) or len(cache) != len(each.model.layers):
            raise ConfigError(
                f"--draft-model does not work with this kind of cache "
                f"({', '.join(kinds.kind_names(cache))})."
            )
    if draft.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ConfigError("--draft-model must have the same vocabulary as the model.")
