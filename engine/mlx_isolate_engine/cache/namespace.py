"""Names of what prompt cache entries may be shared within; pure.

Model, its own adapter and files are in the fingerprint already; a namespace tells apart what one loaded
model can hold at once.
"""

from mlx_isolate_shared.config import EngineSettings


def namespace_of(settings: EngineSettings, *, draft: bool, adapter: str | None = None) -> str:
    """The namespace of a request.

    Args:
        adapter: digest of the adapter that it runs with; the one of --adapter-path is none, since
            it belongs to the model.
        draft: a draft model takes part, whose state lies in the same entry.
    """
    name = "full"
    if settings.kv_bits is not None:
        scheme = (settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start)
        name = "kv " + "/".join(map(str, scheme))
    if adapter is not None:
        name = f"{name} adapter {adapter}"
    return f"{name} draft" if draft else name
