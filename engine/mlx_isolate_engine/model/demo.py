"""The embedded default model: Gemma 3 270M, converted once into the user's cache folder."""

from collections.abc import Callable
from pathlib import Path

from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_shared.wire import Loading


def ensure_demo(cache_home: Path, dtype: str, report: Callable[[Loading], None]) -> Path:
    """The folder of the converted demo model; converts it first if need be."""
    raise ModelError("demo_missing", "the demo model is not built in yet.")
