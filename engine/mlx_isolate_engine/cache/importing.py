"""Takes over prompt caches made by mlx-lm's own tool, which hold no tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_isolate_engine.cache import kinds, snapshot
from mlx_isolate_engine.cache.build import identify
from mlx_isolate_engine.cache.namespace import namespace_of
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.token_index import token_key
from mlx_isolate_engine.generation.quantization import begins_at, namespace_at
from mlx_isolate_engine.model.tokenizer import load_tokenizer
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import ConfigError

# Prompt tokens of one prefill step of mlx-lm's tool.
TOOL_STEP = 2048


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """One file to take over, and how the engine runs that shall use it."""

    file: Path
    prompt: str
    root: Path
    model: str | None
    model_id: str | None
    adapter_path: str | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    bytes_max: int
    trust_remote_code: bool = False


def import_file(request: ImportRequest) -> Path:
    """Write the entry into the cache directory; returns its file.

    Raises:
        ConfigError: the file, the prompt and the model do not belong together.
        CacheError: it cannot be stored.
        OSError: a file cannot be read or written.
    """
    cache, metadata = _load(request.file)
    named = metadata.get("model", "")
    folder = Path(request.model or named).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the model's folder with --model.")
    if named and Path(named).is_dir() and not folder.samefile(named):
        raise ConfigError(f"the file was made with the model in {named}, not with {folder}.")
    settings = EngineSettings(
        adapter_path=request.adapter_path,
        kv_bits=request.kv_bits,
        kv_group_size=request.kv_group_size,
        quantized_kv_start=request.quantized_kv_start,
        trust_remote_code=request.trust_remote_code,
    )
    _check_kinds(cache, folder, settings)
    tokens = _tokens(request.prompt, folder, settings)
    length = kinds.usable_length(len(tokens), cache)
    # The tool runs every token of its prompt; one less is a version that leaves the last.
    if length is None or length < len(tokens) - 1 or not kinds.stands_for(cache, length):
        raise ConfigError(
            f"the prompt has {len(tokens)} tokens with this model's tokenizer and the file holds "
            "another number; it was made from another prompt or with another template."
        )
    identity = identify(settings, folder)
    store = SsdStore(
        request.root,
        StoreIdentity(
            model=str(folder.absolute()),
            model_id=request.model_id or folder.name,
            fingerprint=identity.value,
            tokenizer=identity.tokenizer,
        ),
        bytes_max=request.bytes_max,
    )
    store.open()
    namespace = namespace_of(settings, draft=False)
    if any(isinstance(part, QuantizedKVCache) for part in cache):
        begin = begins_at(len(tokens), start=request.quantized_kv_start, step=TOOL_STEP)
        namespace = namespace_at(namespace, begin)
    return store.store(_entry(cache, tokens[:length], namespace), lambda: None)


def _load(file: Path) -> tuple[list[Any], dict[str, Any]]:
    if not file.is_file():
        raise ConfigError(f"there is no file {file}.")
    try:
        loaded: Any = load_prompt_cache(str(file), return_metadata=True)
    # mlx-lm unpacks whatever the file holds, so a wrong file fails in any of these ways.
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no prompt cache that mlx-lm can read.") from error
    cache, metadata = loaded
    return cache, metadata


def _check_kinds(cache: Sequence[Any], folder: Path, settings: EngineSettings) -> None:
    model, _ = load_model(folder, lazy=True, trust_remote_code=settings.trust_remote_code)
    expected = make_prompt_cache(model)
    if settings.kv_bits is not None:
        scheme = {"group_size": settings.kv_group_size, "bits": settings.kv_bits}
        expected = [c.to_quantized(**scheme) if hasattr(c, "to_quantized") else c for c in expected]
    if [type(c) for c in cache] != [type(c) for c in expected]:
        raise ConfigError("the file's caches are not those that this model makes with these flags.")
    mx.clear_cache()


def _tokens(prompt: str, folder: Path, settings: EngineSettings) -> list[int]:
    """The prompt's tokens as mlx_lm.cache_prompt makes them."""
    tokenizer = load_tokenizer(folder, settings)
    if not tokenizer.has_chat_template:
        tokens: list[int] = tokenizer.encode(prompt)
        return tokens
    message = [{"role": "user", "content": prompt}]
    rendered: list[int] = tokenizer.apply_chat_template(
        message, add_generation_prompt=False, continue_final_message=True
    )
    return rendered


def _entry(cache: Sequence[Any], tokens: Sequence[int], namespace: str) -> Entry:
    kept = snapshot.keep(cache, len(tokens))
    return Entry(
        namespace=namespace,
        key=token_key(tokens),
        cache=kept,
        bytes=snapshot.bytes_of(kept),
        cuttable=kinds.can_cut(kept),
        storable=kinds.can_store(kept),
        kind="prompt",
    )
