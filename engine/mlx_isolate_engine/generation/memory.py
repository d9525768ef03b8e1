"""How many tokens of KV the batch may hold, rows padded to the longest."""

from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from mlx_isolate_engine.cache.kinds import leaves
from mlx_isolate_engine.device import usable_bytes

# Share of the memory that is free after the load which rows may take; the rest is for the model's
# own intermediate results, for the prompt cache, and for the padding of a batch that grows.
KV_SHARE = 0.5
PROBE_TOKENS = 8


def padded_tokens_max(model: Any) -> int | None:
    """Rows times longest row that fit, by the KV bytes of one token; None where they are none.

    Windows and recurrent states do not grow with the text, so only parts that do are counted.
    """
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, PROBE_TOKENS), mx.int32), cache=cache))
    token_bytes = sum(_bytes_per_token(part) for part in leaves(cache))
    if not token_bytes:
        return None
    return max(1, int(_free_bytes() * KV_SHARE / token_bytes))


def _bytes_per_token(part: Any) -> float:
    keys, values = getattr(part, "keys", None), getattr(part, "values", None)
    if getattr(part, "max_size", None) is not None or isinstance(keys, tuple):
        return 0.0
    if keys is None or values is None:
        return 0.0
    capacity = max(1, int(keys.shape[-2]))
    return float(keys.nbytes + values.nbytes) / capacity


def _free_bytes() -> int:
    """Memory left for this process: of the GPU where there is one."""
    of_gpu = usable_bytes()
    return int(psutil.virtual_memory().available) if of_gpu is None else of_gpu
