"""How many tokens of KV the batch may hold, rows padded to the longest."""

from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from mlx_isolate_engine.cache.kinds import leaves
from mlx_isolate_engine.device import usable_bytes
from mlx_isolate_engine.generation import few_shapes
from mlx_isolate_engine.generation.admission import Room
from mlx_isolate_engine.generation.layerwise import batch_bytes

# Share of the memory that is free after the load which rows may take; the rest is for the model's
# own intermediate results and for the prompt cache.
KV_SHARE = 0.5
PROBE_TOKENS = 8


def room_for_rows(model: Any) -> Room | None:
    """What fits, by the bytes of a row's tokens and of what it takes beside them.

    None for a model none of whose parts grows with the text. What a batch needs beside itself
    while rows join and leave is set aside.
    """
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, PROBE_TOKENS), mx.int32), cache=cache))
    layers = [list(leaves([layer])) for layer in cache]
    of_tokens = [sum(map(_bytes_per_token, layer)) for layer in layers]
    of_rows = [sum(map(_bytes_per_row, layer)) for layer in layers]
    token_bytes, row_bytes = sum(of_tokens), sum(of_rows)
    if not token_bytes:
        return None
    # However long the rows are, the largest layer's part of them is between these two.
    share = max(max(of_tokens) / token_bytes, max(of_rows) / row_bytes if row_bytes else 0.0)
    return Room(
        tokens=max(1, int(batch_bytes(_free_bytes() * KV_SHARE, share) / token_bytes)),
        row_tokens=row_bytes / token_bytes,
        few_shapes=few_shapes.are_costly(),
    )


def _bytes_per_token(part: Any) -> float:
    """Of a part that grows with the text."""
    if getattr(part, "max_size", None) is not None:
        return 0.0
    return _kv_bytes(part)


def _bytes_per_row(part: Any) -> float:
    """Of a part that does not: a full window, or a state."""
    if (window := getattr(part, "max_size", None)) is not None:
        return _kv_bytes(part) * int(window)
    return float(part.nbytes) if getattr(part, "keys", None) is None else 0.0


def _kv_bytes(part: Any) -> float:
    """Bytes of one token; what is quantized never gets into a batch."""
    keys, values = getattr(part, "keys", None), getattr(part, "values", None)
    if keys is None or values is None or isinstance(keys, tuple):
        return 0.0
    capacity = max(1, int(keys.shape[-2]))
    return float(keys.nbytes + values.nbytes) / capacity


def _free_bytes() -> int:
    """Memory left for this process: of the GPU where there is one."""
    of_gpu = usable_bytes()
    return int(psutil.virtual_memory().available) if of_gpu is None else of_gpu
