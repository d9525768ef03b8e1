"""From what a user calls a model to a local folder that holds it whole."""

from collections.abc import Callable
from pathlib import Path

from mlx_isolate_shared.wire import Loading

Report = Callable[[Loading], None]


def resolve_model(model: str, cache_home: Path, report: Report) -> Path:
    """The local folder of `model`; downloads or converts where needed.

    Args:
        model: `demo`, an absolute folder, or a hub repo id (`owner/name`).
        cache_home: the user's cache folder, for the converted demo.
        report: gets `Loading` lines of the stages `download` and `convert`.

    Raises:
        ModelError: it does not exist, is broken or cannot be had.
    """
    raise NotImplementedError
