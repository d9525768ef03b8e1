"""How long an idle model stays loaded: its own time, the daemon's, or what a request asked for; pure.

Whoever spells a time as `keep_alive` (Ollama) or `ttl` (LM Studio, llama-swap) is read here too.
"""

import math

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.settings.quantities import parse_time


def idle_limit_s(spec: ModelSpec, daemon_ttl_s: float, asked_s: float | None) -> float | None:
    """Idle seconds after which a model is unloaded; None = never.

    Args:
        daemon_ttl_s: for models without their own; 0 = never.
        asked_s: what the last request that said anything asked for; infinite = never.
    """
    if spec.pinned:
        return None
    if asked_s is not None:
        return None if math.isinf(asked_s) else asked_s
    own = daemon_ttl_s if spec.ttl_s is None else spec.ttl_s
    return own or None


def asked_idle_s(keep_alive: str | float | None, ttl: float | None) -> float | None:
    """What a request asks for: seconds after it, 0 = unload at once, infinite = keep it loaded.

    `keep_alive` counts where both are given; any negative value means for ever.

    Raises:
        ValueError: it is no time.
    """
    given = ttl if keep_alive is None else keep_alive
    if given is None:
        return None
    if isinstance(given, str):
        text = given.strip()
        return math.inf if text.startswith("-") else parse_time(text)
    if given < 0:
        return math.inf
    try:
        seconds = float(given)
    except OverflowError:
        raise ValueError("is too long a time; -1 means for ever") from None
    if math.isnan(seconds):
        raise ValueError("is not a time")
    return seconds
